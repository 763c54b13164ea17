// What the kernels take and do, apart from who calls them (ffi.cc) and with which vectors they are compiled (isa_*.cc).
//
// A kernel is a pure function of its arguments and of a range of independent units of work, so that any number of
// threads may share a call without talking to each other. No unit's result depends on how many units there are, which
// is what makes a product's row independent of the other rows of the call.
#pragma once

#include <stdint.h>

namespace specserve {

inline __attribute__((always_inline)) int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline __attribute__((always_inline)) int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }

// The last three are codes of 4 bits: whole numbers with 8 added, whole numbers from 0 on, and floats of 1 sign bit, 2 of
// exponent and 1 of mantissa (e2m1), which stand for twice their values, so that these are whole numbers too.
enum class Format : int { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt4 = 3, kUint4 = 4, kFp4 = 5 };
constexpr int kFormats = 6;
constexpr int kBits[kFormats] = {32, 16, 8, 4, 4, 4};

// How scales and offsets lie in memory. Those of two levels, as Q4_K has them, lie by super-blocks of kTogether blocks,
// the last filled up with zeros: float16 factors of all outputs of a panel, then the bytes with a sign of each block's
// outputs that are multiplied by them. Such a product has 18 bits at most, so float32 holds it exactly.
enum class Scales : int { kFloat32, kFloat16, kTwoLevels };
constexpr int kTogether = 8;
constexpr int kSuperBytes = 2 + kTogether;  // of a super-block, for each output

// y[r] = x[r] @ weight[group[r]] (+ add[r]), summed in float32 over d_in in ascending order, whatever the number of rows.
// A weight is values * scale + offset, of which each block of inputs has one for each output.
//
// A weight lies in panels of `width` outputs: [d_out / width rounded up, d_in, width]. The float32 values of one input
// are in the order of the outputs. Of narrower values a lane of 32 bits holds several, so that shifts and masks widen
// them: outputs j and j + width / 2 (bfloat16), or j, j + width / 4, j + width / 2 and j + 3 width / 4 (int8), the first
// in the lowest bits. Of 4 bits it holds the same four outputs of two inputs, those of the second in its upper half; each
// block has an even number of inputs, or is the only one. Where weights are multiplied by tiles, a lane holds two
// (bfloat16), four (int8) or eight inputs (4 bits: i in the lower and i + 4 in the upper half of a byte) of one output,
// the panel's tiles follow each other, and each block's inputs are filled up with zeros to whole tiles:
// [d_out / width rounded up, inputs / tile, width / 16, tile / lanes, 16, lanes].
struct Matmul {
  const float* x;        // [rows, d_in]
  const int32_t* group;  // [rows], which weight each row is multiplied by; null: the first. Out of range: y is 0
  const void* panels;    // [groups, d_out / width rounded up, d_in, width]
  const void* scale;     // [groups, d_out / width rounded up, d_in / block rounded up, width]; null: none. Of two levels:
                         // [groups, d_out / width rounded up, super-block, kSuperBytes, width] bytes
  const void* offset;    // like scale; null: none
  const float* add;      // [rows, d_out], added to the finished sums; null: nothing
  float* y;              // [rows, d_out]
  int64_t rows, groups, d_in, d_out, block;
  Scales scales;  // what scales and offsets are
  Format format;
  const int32_t* order;  // [rows], the rows sorted by group
  const int64_t* start;  // [groups + 1], where each group's rows begin in `order`
};

// Softmax attention of a few new tokens of each sequence over [committed pages | new keys] (see kernels/attention.py).
struct Attend {
  const float* q;             // [batch, n, head, head_dim]
  const float* k;             // [batch, m, kv_head, head_dim]
  const float* v;             // [batch, m, kv_head, v_dim]
  const uint8_t* mask;        // [batch or 1, n, m], 1 where the query sees the new key
  const float* k_pages;       // [page, kv_head, head_dim, page_size]
  const float* v_pages;       // [page, kv_head, page_size, v_dim]; null: the keys' first channels, transposed
  const int32_t* page_table;  // [batch, width]
  const int32_t* lens;        // [batch], committed entries
  const int32_t* positions;   // [batch, m], of the new keys, the last n of which are the queries' own; read with a window
  const float* sinks;         // [head]; null: none
  float* out;                 // [batch, n, head, v_dim]
  int64_t batch, n, m, heads, kv_heads, head_dim, v_dim, num_pages, page_size, width, first, window;
  bool has_batched_mask;
  float scale, softcap;
};

// y = x / rms(x) * weight over rows of `size`; with `offset` the weight is a difference from 1.
struct Norm {
  const float* x;       // [rows, size]
  const float* weight;  // [size]
  float* y;             // [rows, size]
  int64_t size;
  float eps;
  bool offset;
};

enum class Activation : int { kSilu = 0, kGelu = 1, kClampedSwiglu = 2 };

// y = activation(gate) * up (see models/layers.py), gate and up in rows of `stride` floats.
struct Gate {
  const float* gate;
  const float* up;
  float* y;  // [rows, size]
  int64_t size, stride;
  Activation activation;
};

// Rotary embedding of the first 2 * half channels of each head; the others are copied. y may be x.
struct Rotate {
  const float* x;    // [rows, heads, head_dim]
  const float* cos;  // [rows, half]
  const float* sin;  // [rows, half]
  float* y;          // like x
  int64_t heads, head_dim, half;
  bool is_interleaved;
};

// The first index of each row's largest value; within the row also where there is no largest (NaN).
struct Argmax {
  const float* x;  // [rows, size]
  int32_t* index;  // [rows]
  int64_t size;
};

// Products of weights of one format by tiles of numbers, in place of `Kernels::matmul`.
struct Tiles {
  int64_t panel_width;
  int64_t inputs;     // of a tile
  int64_t chunk;      // rows that are multiplied together
  int64_t row_block;  // rows of a unit of `matmul`, a multiple of `chunk`
  int64_t (*row_bytes)(const Matmul&);  // of a row as tiles take it, a multiple of 64
  // Writes the rows order[begin:end], one chunk, as tiles take them. `matmul` may read up to 1,024 bytes behind the last.
  void (*split)(const Matmul&, int64_t begin, int64_t end, char* to);
  // The panels [first, last) as in `Kernels::matmul`, of rows that were split, each chunk where the one before it ends.
  void (*matmul)(const Matmul&, int64_t group, int64_t first, int64_t last, int64_t begin, int64_t end,
                 const char* rows);
};

struct Kernels {
  const char* name;
  int64_t panel_width;
  int64_t row_block;  // rows of a unit of `matmul`
  // Outputs [panel * width, (panel + 1) * width) of the rows order[begin:end], all of one group.
  void (*matmul)(const Matmul&, int64_t group, int64_t panel, int64_t begin, int64_t end);
  // One sequence, one KV head, and the queries [begin, end) of the n.
  void (*attend)(const Attend&, int64_t sequence, int64_t kv_head, int64_t begin, int64_t end);
  // The rows [begin, end).
  void (*norm)(const Norm&, int64_t begin, int64_t end);
  void (*gate)(const Gate&, int64_t begin, int64_t end);
  void (*rotate)(const Rotate&, int64_t begin, int64_t end);
  void (*argmax)(const Argmax&, int64_t begin, int64_t end);
  const Tiles* tiles[kFormats] = {};  // by format; null: `matmul` multiplies it
};

// So many floats for the calling thread, until it asks again; what they hold is undefined.
float* scratch(int64_t floats);

const Kernels* kernels_avx512();
const Kernels* kernels_avx2();
const Kernels* kernels_neon();
const Tiles* tiles_amx_bfloat16();
const Tiles* tiles_amx_int8();
const Tiles* tiles_vnni_int4();
const Tiles* tiles_vnni_uint4();
const Tiles* tiles_vnni_fp4();

}  // namespace specserve
