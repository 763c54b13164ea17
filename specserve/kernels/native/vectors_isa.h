// Vectors of LANES floats in the compiler's extensions, and what every kernel does with them. Each isa_*.cc compiles this for
// its instruction set. Nothing of the standard library that leaves code of its own is used here (see library.h).
#pragma once

#include <math.h>
#include <string.h>

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "kernels.h"

namespace specserve {
namespace {

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));
typedef int16_t HalfInts __attribute__((vector_size(2 * LANES)));
typedef uint16_t HalfWords __attribute__((vector_size(2 * LANES)));

template <class T>
inline T load(const void* from) {
  T to;
  memcpy(&to, from, sizeof(T));
  return to;
}

inline Floats load_floats(const float* from) { return load<Floats>(from); }
inline void store(float* to, Floats from) { memcpy(to, &from, sizeof(from)); }

// A vector of which only `count` numbers exist, none if it is below 1.
inline Floats load_part(const float* from, int64_t count) {
  if (count >= LANES) return load_floats(from);
  Floats to = Floats{};
  if (count > 0) memcpy(&to, from, count * sizeof(float));
  return to;
}
inline void store_part(float* to, Floats from, int64_t count) {
  if (count >= LANES) return store(to, from);
  if (count > 0) memcpy(to, &from, count * sizeof(float));
}

inline Floats splat(float value) { return value - Floats{}; }
inline Floats as_floats(Words bits) {
  Floats to;
  memcpy(&to, &bits, sizeof(to));
  return to;
}
inline Words bits_of(Floats x) { return load<Words>(&x); }

inline float sum_of(const float* x, int64_t size) {
  Floats sums = Floats{};
  for (int64_t at = 0; at < size; at += LANES) sums += load_part(x + at, size - at);
  float sum = 0.0f;
  for (int lane = 0; lane < LANES; ++lane) sum += sums[lane];
  return sum;
}

// Narrow numbers in lanes of 32 bits (bytes also of 16), by instructions that GCC does not find for the general
// conversion, which halves vectors first, or goes number by number. widen_halves is of float16 numbers.
#if LANES == 16
inline Floats widen_halves(HalfWords from) {
  return reinterpret_cast<Floats>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(from)));
}
inline Words widen(HalfWords from) {
  return reinterpret_cast<Words>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(from)));
}
inline Ints widen(Bytes from) { return reinterpret_cast<Ints>(_mm512_cvtepi8_epi32(reinterpret_cast<__m128i>(from))); }
inline HalfWords widen_a_little(Bytes from) {
  return reinterpret_cast<HalfWords>(_mm256_cvtepi8_epi16(reinterpret_cast<__m128i>(from)));
}
#elif LANES == 8
inline Floats widen_halves(HalfWords from) {
  return reinterpret_cast<Floats>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(from)));
}
inline Words widen(HalfWords from) {
  return reinterpret_cast<Words>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(from)));
}
inline __m128i low(Bytes from) { return _mm_cvtsi64_si128(load<int64_t>(&from)); }
inline Ints widen(Bytes from) { return reinterpret_cast<Ints>(_mm256_cvtepi8_epi32(low(from))); }
inline HalfWords widen_a_little(Bytes from) { return reinterpret_cast<HalfWords>(_mm_cvtepi8_epi16(low(from))); }
#else
inline Floats widen_halves(HalfWords from) {
  return reinterpret_cast<Floats>(vcvt_f32_f16(reinterpret_cast<float16x4_t>(from)));
}
inline Words widen(HalfWords from) { return __builtin_convertvector(from, Words); }
inline HalfWords widen_a_little(Bytes from) {
  return reinterpret_cast<HalfWords>(__builtin_convertvector(from, HalfInts));
}
inline Ints widen(Bytes from) {
  return __builtin_convertvector(__builtin_convertvector(from, HalfInts), Ints);
}
#endif
inline Floats load_halves(const void* from) { return widen_halves(load<HalfWords>(from)); }

// A vector of scales or offsets: of a block (of so many) of a panel of so many outputs, from the output `at` on.
template <int64_t width>
inline Floats load_scales(const Matmul& call, const void* first, int64_t panel, int64_t block, int64_t blocks,
                          int64_t at) {
  if (call.scales == Scales::kTwoLevels) {
    const int64_t super = panel * ((blocks + kTogether - 1) / kTogether) + block / kTogether;
    const char* from = static_cast<const char*>(first) + super * kSuperBytes * width;
    const Bytes whole = load<Bytes>(from + (2 + block % kTogether) * width + at);
    return load_halves(from + 2 * at) * __builtin_convertvector(widen(whole), Floats);
  }
  const int64_t place = (panel * blocks + block) * width + at;
  if (call.scales == Scales::kFloat16) return load_halves(static_cast<const uint16_t*>(first) + place);
  return load_floats(static_cast<const float*>(first) + place);
}

inline int64_t blocks_of(const Matmul& call) { return (call.d_in + call.block - 1) / call.block; }

}  // namespace
}  // namespace specserve
