// The kernels but for products of 4-bit weights (bytes_isa.h), written once. Each isa_*.cc compiles them for its
// instruction set, with LANES floats to a vector, VECTORS of them to a panel, ROWS to a tile of a product, and REGISTERS
// that hold a vector.

#include "vectors_isa.h"

namespace specserve {
namespace {

constexpr int64_t kWidth = LANES * VECTORS;  // outputs of a panel
// bytes of a panel that are read by all rows before the next, from L1. Where a single tile of rows takes two passes, the
// fewer the sooner the second follows the first, which alone reads memory
constexpr int64_t kBlock = 16384, kBlockOfOneTile = REGISTERS < 32 ? 4096 : kBlock;
constexpr int64_t kAhead = 2048;  // bytes that memory delivers to a core within its latency of some 100 ns

// Bytes of so many inputs in a panel.
template <Format format>
constexpr int64_t bytes_of(int64_t inputs) {
  return inputs * kWidth * kBits[static_cast<int>(format)] / 8;
}

// The weights of one input in a part of a panel: its vectors part, part + kParts, ..., V in all.
template <Format format, int V>
inline void widen(const void* panel, int64_t input, int part, Floats (&w)[V]) {
  constexpr int kParts = VECTORS / V;
  const char* at = static_cast<const char*>(panel) + bytes_of<format>(input);
  if constexpr (format == Format::kFloat32) {
    const float* from = reinterpret_cast<const float*>(at);
    for (int i = 0; i < V; ++i) w[i] = load_floats(from + (part + i * kParts) * LANES);
  } else if constexpr (format == Format::kBfloat16) {
    const uint16_t* from = reinterpret_cast<const uint16_t*>(at);
    for (int i = 0; i < V / 2; ++i) {
      Words pair = load<Words>(from + (part + i * kParts) * 2 * LANES);
      w[i] = as_floats(pair << 16);
      w[i + V / 2] = as_floats(pair & 0xffff0000u);
    }
  } else {
    static_assert(VECTORS == 4, "a lane of 32 bits holds four outputs");
    const Words lanes = load<Words>(at);
    for (int i = 0; i < V; ++i) {
      w[i] = __builtin_convertvector(reinterpret_cast<Ints>(lanes << (24 - 8 * (part + i * kParts))) >> 24, Floats);
    }
  }
}

// The part of what is multiplied next that the rows of a tile ask memory for, from here on so many bytes for each input.
// Else memory would rest while the tiles after the first multiply what that one has read.
struct Ahead {
  const char* from;
  int64_t step;
};

// sums[r] += x[r][begin:end] @ panel[begin:end], for R rows, V vectors of a panel's VECTORS at a time. Each pass asks
// for its share of what is `ahead`. Where these are all rows and there is one pass, it asks for the weights of the next
// inputs, since a processor reads ahead too little while it multiplies many rows.
template <Format format, int R, int V, bool is_all>
void multiply(const float* const* x, const void* panel, int64_t begin, int64_t end, float* sums, Ahead ahead) {
  constexpr int kParts = VECTORS / V;
  constexpr bool is_only = is_all && kParts == 1;
  constexpr int64_t kStride = bytes_of<format>(1), kMost = is_only ? kStride : kStride / 2;  // of an input
  constexpr int64_t kAsked = kMost < 64 ? 64 : kMost;
  if (is_only) ahead.from = static_cast<const char*>(panel) + bytes_of<format>(begin) + kAhead;
  const int64_t step = is_all ? kStride / kParts : (ahead.step + kParts - 1) / kParts;
  for (int part = 0; part < kParts; ++part) {
    Floats sum[R][V];
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < V; ++i) sum[r][i] = load_floats(sums + r * kWidth + (part + i * kParts) * LANES);
    }
    for (int64_t input = begin; input < end; ++input) {
      Floats w[V];
      widen<format, V>(panel, input, part, w);
      for (int r = 0; r < R; ++r) {
        Floats value = splat(x[r][input]);
        for (int i = 0; i < V; ++i) sum[r][i] += value * w[i];
      }
      for (int64_t line = 0; line < kAsked; line += 64) __builtin_prefetch(ahead.from + line, 0, is_only ? 3 : 2);
      ahead.from += step;
    }
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < V; ++i) store(sums + r * kWidth + (part + i * kParts) * LANES, sum[r][i]);
    }
  }
}

template <Format format, int R>
void multiply_rows(int rows, const float* const* x, const void* panel, int64_t begin, int64_t end, float* sums,
                   bool is_all, Ahead ahead) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_rows<format, R - 1>(rows, x, panel, begin, end, sums, is_all, ahead);
  }
  // so many vectors that the sums, the weights and one value of x stay in registers
  constexpr int kVectors = (R + 1) * VECTORS < REGISTERS ? VECTORS : VECTORS / 2;
  auto* run = is_all ? multiply<format, R, kVectors, true> : multiply<format, R, kVectors, false>;
  run(x, panel, begin, end, sums, ahead);
}

template <Format format>
void matmul_as(const Matmul& call, int64_t group, int64_t panel, int64_t begin, int64_t end) {
  const int64_t at_once = (end - begin > ROWS ? kBlock : kBlockOfOneTile) / bytes_of<format>(1);  // inputs
  const int64_t num_panels = (call.d_out + kWidth - 1) / kWidth, rows = end - begin;
  const int64_t place = group * num_panels + panel;  // of the panel
  const int64_t column = panel * kWidth, columns = least(kWidth, call.d_out - column);
  const char* weights = static_cast<const char*>(call.panels) + place * bytes_of<format>(call.d_in);
  const int64_t num_blocks = blocks_of(call);
  float* sums = scratch(2 * rows * kWidth);
  float* totals = sums + rows * kWidth;
  memset(sums, 0, 2 * rows * kWidth * sizeof(float));
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t first = block * call.block, last = least(call.d_in, first + call.block);
    for (int64_t input = first; input < last; input += at_once) {
      const int64_t upto = least(last, input + at_once);
      int64_t tiles = (rows + ROWS - 1) / ROWS;
      const int64_t step = (bytes_of<format>(1) + tiles - 1) / tiles;
      Ahead ahead = {weights + bytes_of<format>(upto) + kAhead, step};
      int tile;
      for (int64_t row = 0; row < rows; row += tile, --tiles) {
        tile = static_cast<int>((rows - row + tiles - 1) / tiles);  // tiles of like size
        const float* x[ROWS];
        for (int r = 0; r < tile; ++r) x[r] = call.x + call.order[begin + row + r] * call.d_in;
        multiply_rows<format, ROWS>(tile, x, weights, input, upto, &sums[row * kWidth], tile == rows, ahead);
        ahead.from += (upto - input) * step;
      }
    }
    if (!call.scale) continue;
    for (int64_t row = 0; row < rows; ++row) {
      float* sum = &sums[row * kWidth];
      float of_x = 0.0f;
      if (call.offset) of_x = sum_of(call.x + call.order[begin + row] * call.d_in + first, last - first);
      for (int64_t i = 0; i < kWidth; i += LANES) {
        Floats scaled = load_floats(sum + i) * load_scales<kWidth>(call, call.scale, place, block, num_blocks, i);
        if (call.offset) scaled += load_scales<kWidth>(call, call.offset, place, block, num_blocks, i) * of_x;
        if (num_blocks > 1) {
          float* total = &totals[row * kWidth + i];
          store(total, load_floats(total) + scaled);
          scaled = Floats{};
        }
        store(sum + i, scaled);
      }
    }
  }
  const float* from = num_blocks > 1 ? totals : sums;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t place = call.order[begin + row] * call.d_out + column;
    if (call.add) {
      for (int64_t i = 0; i < columns; ++i) call.y[place + i] = from[row * kWidth + i] + call.add[place + i];
    } else {
      memcpy(call.y + place, from + row * kWidth, columns * sizeof(float));
    }
  }
}

void matmul(const Matmul& call, int64_t group, int64_t panel, int64_t begin, int64_t end) {
  switch (call.format) {
    case Format::kFloat32: return matmul_as<Format::kFloat32>(call, group, panel, begin, end);
    case Format::kBfloat16: return matmul_as<Format::kBfloat16>(call, group, panel, begin, end);
    case Format::kInt8: return matmul_as<Format::kInt8>(call, group, panel, begin, end);
    default: return;  // by tiles (bytes_isa.h)
  }
}

// exp(x) for x <= 0, to 2 units in the last place: Cody and Waite's reduction by powers of two, then the polynomial of
// degree 6 with minimal error on [-ln 2 / 2, ln 2 / 2]. Below the smallest normal number the result is 0.
inline Floats exp_of_negative(Floats x) {
  const Floats lowest = splat(-87.3f);
  Floats clamped = x > lowest ? x : lowest;
  Floats rounded = clamped * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
  Floats n = rounded - 12582912.0f;
  Floats r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  Floats power;
  memcpy(&power, &exponent, sizeof(power));
  return x > lowest ? p * power : splat(0.0f);
}

// A vector of numbers of pages, each as `read` reads it.
inline Floats load_vector(const float* from) { return load_floats(from); }
inline Floats load_vector(const PageBfloat16* from) { return as_floats(widen(load<HalfWords>(from)) << 16); }
inline Floats load_vector(const int8_t* from) { return __builtin_convertvector(widen(load<Bytes>(from)), Floats); }
inline Floats load_vector(const PageFloat8* from) {  // sign, 4 bits and 3 in the places of float16's sign, 5 bits and 10
  return widen_halves(widen_a_little(load<Bytes>(from)) << 7 & 0xbfff);
}

// out[r][c] += sum over k in ascending order of x[r][k] * w[k][c], for R rows and the C vectors from column c on. Asks
// for the same part of `ahead`, which lies like w.
template <int R, int C, class T>
void multiply_small(const float* x, int64_t x_stride, const T* w, const T* ahead, int64_t w_stride,
                    int64_t inner, float* out, int64_t out_stride) {
  constexpr int kLine = 64 / LANES / sizeof(T) ? 64 / LANES / sizeof(T) : 1;  // vectors of a line of the cache
  Floats sum[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) sum[r][c] = load_floats(out + r * out_stride + c * LANES);
  }
  for (int64_t k = 0; k < inner; ++k) {
    Floats row[C];
    for (int c = 0; c < C; ++c) row[c] = load_vector(w + k * w_stride + c * LANES);
    for (int c = 0; c < C; c += kLine) __builtin_prefetch(ahead + k * w_stride + c * LANES);
    for (int r = 0; r < R; ++r) {
      Floats value = splat(x[r * x_stride + k]);
      for (int c = 0; c < C; ++c) sum[r][c] += value * row[c];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) store(out + r * out_stride + c * LANES, sum[r][c]);
  }
}

template <int R, class T>
void multiply_columns(const float* x, int64_t x_stride, const T* w, const T* ahead, int64_t w_stride,
                      int64_t inner, int64_t columns, float* out, int64_t out_stride) {
  int64_t c = 0;
  if constexpr (4 * R + 5 <= REGISTERS) {  // a sum waits for the one before it, so there must be several
    for (; c + 4 * LANES <= columns; c += 4 * LANES) {
      multiply_small<R, 4>(x, x_stride, w + c, ahead + c, w_stride, inner, out + c, out_stride);
    }
  }
  for (; c + 2 * LANES <= columns; c += 2 * LANES) {
    multiply_small<R, 2>(x, x_stride, w + c, ahead + c, w_stride, inner, out + c, out_stride);
  }
  for (; c + LANES <= columns; c += LANES) {
    multiply_small<R, 1>(x, x_stride, w + c, ahead + c, w_stride, inner, out + c, out_stride);
  }
  for (; c < columns; ++c) {
    for (int r = 0; r < R; ++r) {
      float sum = out[r * out_stride + c];
      for (int64_t k = 0; k < inner; ++k) sum = __builtin_fmaf(x[r * x_stride + k], read(w[k * w_stride + c]), sum);
      out[r * out_stride + c] = sum;
    }
  }
}

// out [rows, columns] += x [rows, inner] @ w [inner, columns]; each result is one chain of sums over `inner`. `ahead` is
// what will be multiplied next, like w.
template <class T>
void accumulate(const float* x, int64_t x_stride, const T* w, const T* ahead, int64_t w_stride, int64_t rows,
                int64_t inner, int64_t columns, float* out, int64_t out_stride) {
  constexpr int kTile = LANES == 8 ? 4 : 8;  // AVX2 has half of the registers
  using Run = decltype(&multiply_columns<1, T>);
  constexpr Run kRuns[kTile + 1] = {nullptr, multiply_columns<1, T>, multiply_columns<2, T>, multiply_columns<3, T>,
#if LANES != 8
                                    multiply_columns<4, T>, multiply_columns<5, T>, multiply_columns<6, T>, multiply_columns<7, T>,
#endif
                                    multiply_columns<kTile, T>};
  for (int64_t r = 0, tile; r < rows; r += tile) {
    tile = least(rows - r, kTile);
    kRuns[tile](x + r * x_stride, x_stride, w, ahead, w_stride, inner, columns, out + r * out_stride, out_stride);
    ahead = w;  // what comes next is on its way
  }
}

constexpr int64_t kPagesAhead = 2;  // pages that are asked for before they are read

// Multiplies each row by its keys' scales and the unit of their numbers.
void scale_rows(float* rows, int64_t stride, int64_t count, const float* scale, int64_t keys, float unit) {
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t key = 0; key < keys; ++key) rows[row * stride + key] *= scale[key] * unit;
  }
}

// The first `count` of an entry's numbers as pages will keep them and `read` reads them, `stride` apart. Returns the
// entry's scale.
template <class T>
float round_entry(const float* from, int64_t size, int64_t count, float* to, int64_t stride) {
  const float scale = kLargest<T> > 0.0f ? scale_of<T>(from, size) : 1.0f, inverse = 1.0f / scale;
  for (int64_t i = 0; i < count; ++i) {
    T kept;
    keep(from[i] * inverse, &kept);
    to[i * stride] = read(kept);
  }
  return scale;
}

// How many of a query's keys there are up to the last that it sees.
inline int64_t num_seen(const uint8_t* mask, int64_t count) {
  for (; count >= 8; count -= 8) {
    uint64_t last;
    memcpy(&last, mask + count - 8, sizeof(last));
    if (last) break;
  }
  while (count > 0 && !mask[count - 1]) --count;
  return count;
}

// A query's softmax is taken over its keys in the order of the sequence, with the largest score known beforehand: first
// all scores, then one chain of sums over the values. Whether a key is committed or new then changes no bit, so a token
// gets the same result from plain decoding, from the verification of a tree, and from a prompt's chunk.
template <class T>
void attend_stored(const Attend& call, int64_t sequence, int64_t kv_head, int64_t begin, int64_t end) {
  constexpr bool has_scales = kLargest<T> > 0.0f, is_rounded = sizeof(T) < sizeof(float);
  const T *k_pages = static_cast<const T*>(call.k_pages), *v_pages = static_cast<const T*>(call.v_pages);
  const int64_t group = call.heads / call.kv_heads, n = end - begin, rows = group * n;
  const int64_t len = least(most(call.lens[sequence], 0), call.width * call.page_size);
  const int64_t pages = (len + call.page_size - 1) / call.page_size;
  // new keys that no query of this unit sees, as most of a prompt's are, are not looked at
  const uint8_t* masks = call.mask + (call.has_batched_mask ? sequence * call.n : 0) * call.m;
  int64_t m = 0;
  for (int64_t query = begin; query < end; ++query) m = most(m, num_seen(masks + query * call.m, call.m));
  if (!m) {  // queries that do not even see themselves are padding: their results are 0
    for (int64_t query = begin; query < end; ++query) {
      float* to = call.out + ((sequence * call.n + query) * call.heads + kv_head * group) * call.v_dim;
      memset(to, 0, group * call.v_dim * sizeof(float));
    }
    return;
  }
  const int64_t committed = pages * call.page_size, keys = committed + m;
  const int32_t* table = call.page_table + sequence * call.width;
  const int64_t sizes[] = {rows * call.head_dim, rows * keys, rows * call.v_dim, rows,
                           most(call.head_dim * m, call.page_size * call.v_dim), is_rounded ? m * call.v_dim : 0};
  float* q_rows = scratch(sizes[0] + sizes[1] + sizes[2] + sizes[3] + sizes[4] + sizes[5] + 2 * m);
  float* scores = q_rows + sizes[0];
  float* out = scores + sizes[1];
  float* total = out + sizes[2];
  float* transposed = total + sizes[3];
  float* rounded = transposed + sizes[4];  // new values
  float *k_scale = rounded + sizes[5], *v_scale = k_scale + m;  // of new entries
  memset(scores, 0, (sizes[1] + sizes[2]) * sizeof(float));
  auto page_of = [&](int64_t page) {
    return (least(most(table[page], 0), call.num_pages - 1) * call.kv_heads + kv_head) * call.page_size;
  };
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t query = begin + row % n, head = kv_head * group + row / n;
    const float* from = call.q + ((sequence * call.n + query) * call.heads + head) * call.head_dim;
    for (int64_t i = 0; i < call.head_dim; ++i) q_rows[row * call.head_dim + i] = from[i] * call.scale;
  }
  // of all that is read, the i-th part: the keys of each page, and then its values
  auto part_of = [&](int64_t i) {
    if (i < pages || !v_pages) return k_pages + page_of(least(i, pages - 1)) * call.head_dim;
    return v_pages + page_of(least(i, 2 * pages - 1) - pages) * call.v_dim;
  };
  for (int64_t i = 0; i < least(pages, kPagesAhead); ++i) {
    for (int64_t at = 0; at < call.head_dim * call.page_size; at += 64 / sizeof(T)) __builtin_prefetch(part_of(i) + at);
  }
  for (int64_t page = 0; page < pages; ++page) {
    accumulate(q_rows, call.head_dim, part_of(page), part_of(page + kPagesAhead), call.page_size, rows, call.head_dim,
               call.page_size, &scores[page * call.page_size], keys);
    if constexpr (has_scales) scale_rows(&scores[page * call.page_size], keys, rows, call.k_scale + page_of(page),
                                         call.page_size, kUnit<T>);
  }
  for (int64_t key = 0; key < m; ++key) {
    const int64_t place = (sequence * call.m + key) * call.kv_heads + kv_head;
    const float *from = call.k + place * call.head_dim, *values = call.v + place * call.v_dim;
    k_scale[key] = round_entry<T>(from, call.head_dim, call.head_dim, transposed + key, m);
    if constexpr (is_rounded) {  // values that are keys are a part of them, under the same scale
      v_scale[key] = v_pages ? round_entry<T>(values, call.v_dim, call.v_dim, rounded + key * call.v_dim, 1)
                             : round_entry<T>(from, call.head_dim, call.v_dim, rounded + key * call.v_dim, 1);
    }
  }
  accumulate(q_rows, call.head_dim, transposed, transposed, m, rows, call.head_dim, m, &scores[committed], keys);
  if constexpr (has_scales) scale_rows(&scores[committed], keys, rows, k_scale, m, kUnit<T>);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t query = begin + row % n;
    float* score = &scores[row * keys];
    const uint8_t* mask = masks + query * call.m;
    const int32_t* positions = call.window ? call.positions + sequence * call.m : nullptr;
    const int32_t position = call.window ? positions[call.m - call.n + query] : 0;
    const int64_t first = most(call.first, call.window ? position - call.window + 1 : 0);
    const float sink = call.sinks ? call.sinks[kv_head * group + row / n] : -INFINITY;
    if (call.softcap) {
      for (int64_t key = 0; key < keys; ++key) score[key] = call.softcap * tanhf(score[key] / call.softcap);
    }
    for (int64_t key = 0; key < least(first, committed); ++key) score[key] = -INFINITY;
    for (int64_t key = len; key < committed; ++key) score[key] = -INFINITY;
    for (int64_t key = 0; key < m; ++key) {
      const bool in_window = !call.window || position - positions[key] < call.window;
      if (!mask[key] || !in_window) score[committed + key] = -INFINITY;
    }
    Floats most_of = splat(sink);
    int64_t looked = 0;
    for (; looked + LANES <= keys; looked += LANES) {
      const Floats next = load_floats(score + looked);
      most_of = most_of < next ? next : most_of;
    }
    float largest = sink;
    for (int lane = 0; lane < LANES; ++lane) largest = largest < most_of[lane] ? most_of[lane] : largest;
    for (; looked < keys; ++looked) largest = largest < score[looked] ? score[looked] : largest;
    // a query that sees nothing is padding: its result is 0
    const float base = largest == -INFINITY ? 0.0f : largest;
    int64_t key = 0;
    for (; key + LANES <= keys; key += LANES) {
      store(score + key, exp_of_negative(load_floats(score + key) - splat(base)));
    }
    if (key < keys) {
      Floats rest = splat(-INFINITY);
      memcpy(&rest, score + key, (keys - key) * sizeof(float));
      rest = exp_of_negative(rest - splat(base));
      memcpy(score + key, &rest, (keys - key) * sizeof(float));
    }
    // LANES sums, of which the i-th visible key of the sequence goes to number i % LANES
    Floats sums = splat(0.0f);
    for (key = 0; key + LANES <= len; key += LANES) sums += load_floats(score + key);
    float by_lane[LANES];
    memcpy(by_lane, &sums, sizeof(sums));
    for (; key < len; ++key) by_lane[key % LANES] += score[key];
    int64_t place = len;
    for (key = committed; key < keys; ++key) {
      if (mask[key - committed]) by_lane[place++ % LANES] += score[key];
    }
    float sum = call.sinks ? expf(sink - base) : 0.0f;
    for (int64_t i = 0; i < LANES; ++i) sum += by_lane[i];
    total[row] = num_seen(mask, m) ? sum : 0.0f;
  }
  for (int64_t page = 0; page < pages; ++page) {
    const int64_t inner = least(call.page_size, len - page * call.page_size);
    float* weights = &scores[page * call.page_size];
    if constexpr (has_scales) {
      scale_rows(weights, keys, rows, (v_pages ? call.v_scale : call.k_scale) + page_of(page), inner, kUnit<T>);
    }
    if (v_pages) {
      accumulate(weights, keys, part_of(pages + page), part_of(pages + page + kPagesAhead), call.v_dim, rows, inner,
                 call.v_dim, out, call.v_dim);
      continue;
    }
    const T* from = k_pages + page_of(page) * call.head_dim;
    for (int64_t i = 0; i < call.v_dim; ++i) {
      for (int64_t key = 0; key < inner; ++key) transposed[key * call.v_dim + i] = read(from[i * call.page_size + key]);
    }
    accumulate(weights, keys, transposed, transposed, call.v_dim, rows, inner, call.v_dim, out, call.v_dim);
  }
  if constexpr (has_scales) scale_rows(&scores[committed], keys, rows, v_scale, m, kUnit<T>);
  const float* new_values = is_rounded ? rounded : call.v + (sequence * call.m * call.kv_heads + kv_head) * call.v_dim;
  const int64_t stride = is_rounded ? call.v_dim : call.kv_heads * call.v_dim;
  accumulate(&scores[committed], keys, new_values, new_values, stride, rows, m, call.v_dim, out, call.v_dim);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t query = begin + row % n, head = kv_head * group + row / n;
    float* to = call.out + ((sequence * call.n + query) * call.heads + head) * call.v_dim;
    const float factor = total[row] > 0.0f ? 1.0f / total[row] : 0.0f;
    for (int64_t i = 0; i < call.v_dim; ++i) to[i] = out[row * call.v_dim + i] * factor;
  }
}

void attend(const Attend& call, int64_t sequence, int64_t kv_head, int64_t begin, int64_t end) {
  using Run = decltype(&attend_stored<float>);
  constexpr Run kRuns[] = {attend_stored<float>, attend_stored<PageBfloat16>, attend_stored<int8_t>, attend_stored<PageFloat8>};
  kRuns[static_cast<int>(call.stored)](call, sequence, kv_head, begin, end);
}

void norm(const Norm& call, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* x = call.x + row * call.size;
    float* y = call.y + row * call.size;
    Floats squares = splat(0.0f);
    int64_t i = 0;
    for (; i + LANES <= call.size; i += LANES) squares += load_floats(x + i) * load_floats(x + i);
    if (i < call.size) squares += load_part(x + i, call.size - i) * load_part(x + i, call.size - i);
    float sum = 0.0f;
    for (int lane = 0; lane < LANES; ++lane) sum += squares[lane];
    const Floats factor = splat(1.0f / sqrtf(sum / static_cast<float>(call.size) + call.eps));
    const Floats one = splat(call.offset ? 1.0f : 0.0f);
    for (i = 0; i + LANES <= call.size; i += LANES) {
      store(y + i, load_floats(x + i) * factor * (load_floats(call.weight + i) + one));
    }
    if (i < call.size) {
      const int64_t count = call.size - i;
      store_part(y + i, load_part(x + i, count) * factor * (load_part(call.weight + i, count) + one), count);
    }
  }
}

inline Floats magnitude(Floats x) { return x < splat(0.0f) ? -x : x; }

inline Floats sigmoid(Floats x) {
  const Floats e = exp_of_negative(-magnitude(x));
  const Floats one = splat(1.0f);
  return (x < splat(0.0f) ? e : one) / (one + e);
}

inline Floats activate(Floats gate, Floats up, Activation activation) {
  const Floats one = splat(1.0f);
  if (activation == Activation::kSilu) return gate * sigmoid(gate) * up;
  if (activation == Activation::kClampedSwiglu) {
    const Floats bound = splat(7.0f);
    gate = gate > bound ? bound : gate;
    up = up > bound ? bound : up < -bound ? -bound : up;
    return gate * sigmoid(gate * 1.702f) * (up + one);
  }
  // gelu by tanh: 0.5 (1 + tanh(u)) is the sigmoid of 2 u
  const Floats u = (gate + gate * gate * gate * 0.044715f) * 0.7978845608f;
  return gate * sigmoid(u + u) * up;
}

void gate(const Gate& call, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* gate = call.gate + row * call.stride;
    const float* up = call.up + row * call.stride;
    float* y = call.y + row * call.size;
    int64_t i = 0;
    for (; i + LANES <= call.size; i += LANES) {
      store(y + i, activate(load_floats(gate + i), load_floats(up + i), call.activation));
    }
    if (i < call.size) {
      const int64_t count = call.size - i;
      store_part(y + i, activate(load_part(gate + i, count), load_part(up + i, count), call.activation), count);
    }
  }
}

void rotate(const Rotate& call, int64_t begin, int64_t end) {
  const int64_t step = call.is_interleaved ? 2 : 1, apart = call.is_interleaved ? 1 : call.half;
  for (int64_t row = begin; row < end; ++row) {
    const float *cos = call.cos + row * call.half, *sin = call.sin + row * call.half;
    for (int64_t head = 0; head < call.heads; ++head) {
      const float* x = call.x + (row * call.heads + head) * call.head_dim;
      float* y = call.y + (row * call.heads + head) * call.head_dim;
      for (int64_t i = 0; i < call.half; ++i) {
        const float first = x[i * step], second = x[i * step + apart];
        y[i * step] = __builtin_fmaf(first, cos[i], -(second * sin[i]));
        y[i * step + apart] = __builtin_fmaf(second, cos[i], first * sin[i]);
      }
      if (y != x) memcpy(y + 2 * call.half, x + 2 * call.half, (call.head_dim - 2 * call.half) * sizeof(float));
    }
  }
}

void argmax(const Argmax& call, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* x = call.x + row * call.size;
    Floats best = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= call.size; i += LANES) {
      const Floats next = load_floats(x + i);
      best = next > best ? next : best;
    }
    float largest = -INFINITY;
    for (int lane = 0; lane < LANES; ++lane) largest = largest < best[lane] ? best[lane] : largest;
    for (; i < call.size; ++i) largest = largest < x[i] ? x[i] : largest;
    int64_t index = 0;
    while (index + 1 < call.size && x[index] != largest) ++index;
    call.index[row] = static_cast<int32_t>(index);
  }
}

}  // namespace
}  // namespace specserve
