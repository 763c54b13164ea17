// The instructions of AVX2 and AVX-512 that the kernels name, one number at a time, in place of the compiler's file of this
// name (check_kernels.py).
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef long long __m128i __attribute__((vector_size(16)));
typedef long long __m256i __attribute__((vector_size(32)));
typedef long long __m512i __attribute__((vector_size(64)));
typedef float __m256 __attribute__((vector_size(32)));
typedef float __m512 __attribute__((vector_size(64)));

namespace emulated {

template <class T, class Vector>
struct Numbers {
  static constexpr int kCount = sizeof(Vector) / sizeof(T);
  T of[kCount];
  Numbers() = default;
  explicit Numbers(Vector vector) { memcpy(of, &vector, sizeof(of)); }
  operator Vector() const {
    Vector vector;
    memcpy(&vector, of, sizeof(vector));
    return vector;
  }
};

// Each of the first numbers of a vector as one of another type.
template <class From, class To, class Result, class Vector, class Convert>
Result each(Vector vector, Convert convert) {
  const Numbers<From, Vector> from(vector);
  Numbers<To, Result> to;
  static_assert(to.kCount <= from.kCount, "as many numbers");
  for (int i = 0; i < to.kCount; ++i) to.of[i] = static_cast<To>(convert(from.of[i]));
  return to;
}

template <class From, class To, class Result, class Vector>
Result widened(Vector vector) {
  return each<From, To, Result>(vector, [](From from) { return from; });
}

template <class Result, class Vector>
Result whole(Vector x) {
  return each<float, int32_t, Result>(x, [](float from) { return isnan(from) ? INT32_MIN : lrintf(from); });
}

template <class T, class Vector>
Vector all(T number) {
  return each<T, T, Vector>(Vector{}, [=](T) { return number; });
}

template <class Vector>
Vector in_each_part(__m128i x) {
  Vector result;
  for (size_t at = 0; at < sizeof(result); at += sizeof(x)) memcpy(reinterpret_cast<char*>(&result) + at, &x, sizeof(x));
  return result;
}

template <class Vector>
Vector look_up(Vector table, Vector names) {
  const Numbers<uint8_t, Vector> from(table), at(names);
  Numbers<uint8_t, Vector> result;
  for (int i = 0; i < at.kCount; ++i) result.of[i] = at.of[i] & 128 ? 0 : from.of[i / 16 * 16 + at.of[i] % 16];
  return result;
}

// Sums of neighbouring products of bytes with and without a sign, no further than 16 bits reach.
template <class Vector>
Vector pairs_of_bytes(Vector x, Vector y) {
  const Numbers<uint8_t, Vector> left(x);
  const Numbers<int8_t, Vector> right(y);
  Numbers<int16_t, Vector> result;
  for (int i = 0; i < result.kCount; ++i) {
    const int sum = left.of[2 * i] * right.of[2 * i] + left.of[2 * i + 1] * right.of[2 * i + 1];
    result.of[i] = static_cast<int16_t>(sum > INT16_MAX ? INT16_MAX : sum < INT16_MIN ? INT16_MIN : sum);
  }
  return result;
}

template <class Vector>
Vector pairs(Vector x, Vector y) {
  const Numbers<int16_t, Vector> left(x), right(y);
  Numbers<int32_t, Vector> result;
  for (int i = 0; i < result.kCount; ++i) {
    result.of[i] = left.of[2 * i] * right.of[2 * i] + left.of[2 * i + 1] * right.of[2 * i + 1];
  }
  return result;
}

// The sums and four products of bytes, without and with a sign, for each.
template <class Vector>
Vector dot_products(Vector sums, Vector x, Vector y) {
  const Numbers<uint8_t, Vector> left(x);
  const Numbers<int8_t, Vector> right(y);
  Numbers<int32_t, Vector> result(sums);
  for (int i = 0; i < left.kCount; ++i) result.of[i / 4] += left.of[i] * right.of[i];
  return result;
}

}  // namespace emulated

inline __m512 _mm512_cvtph_ps(__m256i x) { return emulated::widened<_Float16, float, __m512>(x); }
inline __m256 _mm256_cvtph_ps(__m128i x) { return emulated::widened<_Float16, float, __m256>(x); }
inline __m512i _mm512_cvtepu16_epi32(__m256i x) { return emulated::widened<uint16_t, int32_t, __m512i>(x); }
inline __m256i _mm256_cvtepu16_epi32(__m128i x) { return emulated::widened<uint16_t, int32_t, __m256i>(x); }
inline __m512i _mm512_cvtepi8_epi32(__m128i x) { return emulated::widened<int8_t, int32_t, __m512i>(x); }
inline __m256i _mm256_cvtepi8_epi32(__m128i x) { return emulated::widened<int8_t, int32_t, __m256i>(x); }
inline __m256i _mm256_cvtepi8_epi16(__m128i x) { return emulated::widened<int8_t, int16_t, __m256i>(x); }
inline __m128i _mm_cvtepi8_epi16(__m128i x) { return emulated::widened<int8_t, int16_t, __m128i>(x); }
inline __m128i _mm512_cvtepi32_epi8(__m512i x) {
  return emulated::each<uint32_t, uint8_t, __m128i>(x, [](uint32_t from) { return from & 255; });
}
inline __m512i _mm512_cvtps_epi32(__m512 x) { return emulated::whole<__m512i>(x); }
inline __m256i _mm256_cvtps_epi32(__m256 x) { return emulated::whole<__m256i>(x); }
inline __m512i _mm512_set1_epi16(int16_t number) { return emulated::all<int16_t, __m512i>(number); }
inline __m256i _mm256_set1_epi16(int16_t number) { return emulated::all<int16_t, __m256i>(number); }
inline __m256i _mm256_set1_epi32(int32_t number) { return emulated::all<int32_t, __m256i>(number); }
inline __m256i _mm256_setr_epi32(int32_t a, int32_t b, int32_t c, int32_t d, int32_t e, int32_t f, int32_t g, int32_t h) {
  const int32_t numbers[] = {a, b, c, d, e, f, g, h};
  __m256i result;
  memcpy(&result, numbers, sizeof(result));
  return result;
}
inline __m512i _mm512_broadcast_i32x4(__m128i x) { return emulated::in_each_part<__m512i>(x); }
inline __m256i _mm256_broadcastsi128_si256(__m128i x) { return emulated::in_each_part<__m256i>(x); }
inline __m128i _mm256_castsi256_si128(__m256i x) { return emulated::widened<int64_t, int64_t, __m128i>(x); }
inline __m128i _mm_cvtsi64_si128(int64_t x) { return __m128i{x, 0}; }
inline int64_t _mm_cvtsi128_si64(__m128i x) { return x[0]; }
inline __m256i _mm256_permutevar8x32_epi32(__m256i x, __m256i names) {
  const emulated::Numbers<int32_t, __m256i> from(x);
  return emulated::each<uint32_t, int32_t, __m256i>(names, [&](uint32_t name) { return from.of[name % 8]; });
}
inline __m512i _mm512_shuffle_epi8(__m512i table, __m512i names) { return emulated::look_up(table, names); }
inline __m256i _mm256_shuffle_epi8(__m256i table, __m256i names) { return emulated::look_up(table, names); }
inline __m512i _mm512_maddubs_epi16(__m512i x, __m512i y) { return emulated::pairs_of_bytes(x, y); }
inline __m256i _mm256_maddubs_epi16(__m256i x, __m256i y) { return emulated::pairs_of_bytes(x, y); }
inline __m512i _mm512_madd_epi16(__m512i x, __m512i y) { return emulated::pairs(x, y); }
inline __m256i _mm256_madd_epi16(__m256i x, __m256i y) { return emulated::pairs(x, y); }
inline __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i x, __m512i y) { return emulated::dot_products(sums, x, y); }
inline __m256i _mm256_dpbusd_avx_epi32(__m256i sums, __m256i x, __m256i y) { return emulated::dot_products(sums, x, y); }
