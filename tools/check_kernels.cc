// Runs the products of kernels beside a plain loop in double precision (see check_kernels.py).

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <random>
#include <vector>

#include "kernels.h"

namespace specserve {

float* scratch(int64_t floats) {
  static std::vector<float> kept;
  if (static_cast<int64_t>(kept.size()) < floats) kept.resize(floats);
  return kept.data();
}

}  // namespace specserve

using specserve::Format;
using specserve::Kernels;
using specserve::Matmul;
using specserve::Scales;

namespace {

constexpr double kUnit = 1.0 / (1 << 24);  // the unit roundoff of float32
constexpr int64_t kMostInputs = 128;        // that share a unit of two digits (bytes_isa.h)
#if defined(__aarch64__)
typedef __fp16 Half;
#else
typedef _Float16 Half;
#endif

uint16_t upper_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return static_cast<uint16_t>(bits >> 16);
}

float widened(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// How the scales of whole numbers lie: those of Q4_1, NVFP4's widened, groups of symmetric numbers, and K-quants.
struct Blocks {
  int64_t inputs;  // that share a scale, and an offset where there are any
  Scales scales;
  bool has_offset;
};
constexpr Blocks kBlocks[] = {{32, Scales::kFloat16, true},
                              {16, Scales::kFloat32, false},
                              {128, Scales::kFloat16, false},
                              {32, Scales::kFloat32, true},
                              {32, Scales::kTwoLevels, true}};
constexpr int64_t kNumBlocks = sizeof kBlocks / sizeof *kBlocks;
constexpr Blocks kWhole = {int64_t{1} << 32, Scales::kFloat32, false};  // a scale for all inputs of an output

// A weight in panels, as kernels.h says that it lies, and what it is in float32.
struct Weight {
  std::vector<uint8_t> panels;
  Blocks blocks;
  std::vector<uint8_t> scale, offset;    // as kernels.h says that they lie; empty: none
  std::vector<float> plain, magnitudes;  // [d_in, d_out]
};

// The number of a code of 4 bits.
float number(Format format, int code) {
  constexpr float kDoubles[] = {0, 1, 2, 3, 4, 6, 8, 12};
  if (format == Format::kFp4) return code & 8 ? -kDoubles[code & 7] : kDoubles[code];
  return static_cast<float>(format == Format::kInt4 ? code - 8 : code);
}

// Scales or offsets of so many panels and blocks as they lie, and what they are: [panel, block, width].
std::vector<uint8_t> draw(Scales scales, int64_t panels, int64_t blocks, int64_t width, std::mt19937& random,
                          std::vector<float>& numbers) {
  std::uniform_real_distribution<float> factors(0.01f, 0.02f);
  std::uniform_int_distribution<int> times(-128, 127);
  numbers.resize(panels * blocks * width);
  if (scales != Scales::kTwoLevels) {
    const size_t size = scales == Scales::kFloat16 ? 2 : 4;
    std::vector<uint8_t> made(numbers.size() * size);
    for (size_t i = 0; i < numbers.size(); ++i) {
      const Half half = static_cast<Half>(factors(random));
      numbers[i] = half;
      memcpy(&made[size * i], size == 2 ? static_cast<const void*>(&half) : &numbers[i], size);
    }
    return made;
  }
  const int64_t supers = (blocks + specserve::kTogether - 1) / specserve::kTogether;
  std::vector<uint8_t> made(panels * supers * specserve::kSuperBytes * width);
  for (int64_t panel = 0; panel < panels; ++panel) {
    for (int64_t super = 0; super < supers; ++super) {
      uint8_t* to = &made[(panel * supers + super) * specserve::kSuperBytes * width];
      for (int64_t j = 0; j < width; ++j) {
        const Half factor = static_cast<Half>(factors(random) / 64);
        memcpy(to + 2 * j, &factor, 2);
        for (int64_t i = 0; i < specserve::kTogether; ++i) {
          const int64_t block = super * specserve::kTogether + i;
          if (block >= blocks) continue;
          const int8_t whole = static_cast<int8_t>(times(random));
          memcpy(to + (2 + i) * width + j, &whole, 1);
          numbers[(panel * blocks + block) * width + j] = static_cast<float>(factor) * whole;
        }
      }
    }
  }
  return made;
}

Weight make_coded(Format format, const Blocks& blocks, int64_t d_in, int64_t d_out, int64_t width,
                  std::mt19937& random) {
  std::uniform_int_distribution<int> codes(0, 15);
  const int64_t num_panels = (d_out + width - 1) / width, num_blocks = (d_in + blocks.inputs - 1) / blocks.inputs;
  const int64_t steps = (std::min(blocks.inputs, d_in) + 7) / 8;  // of a block: eight inputs share 32 bits
  Weight made{std::vector<uint8_t>(num_panels * num_blocks * steps * 4 * width), blocks};
  made.plain.resize(d_in * d_out), made.magnitudes.resize(d_in * d_out);
  std::vector<float> scale, offset(num_panels * num_blocks * width);
  made.scale = draw(blocks.scales, num_panels, num_blocks, width, random, scale);
  if (blocks.has_offset) made.offset = draw(blocks.scales, num_panels, num_blocks, width, random, offset);
  for (int64_t i = 0; i < d_in; ++i) {
    for (int64_t j = 0; j < d_out; ++j) {
      const int code = codes(random);
      const int64_t place = (j / width * num_blocks + i / blocks.inputs) * width + j % width, input = i % blocks.inputs;
      // the first four inputs of a step in the lower halves of an output's four bytes
      const int64_t step = place / width * steps + input / 8;
      made.panels[(step * width + j % width) * 4 + input % 4] |= static_cast<uint8_t>(code << input % 8 / 4 * 4);
      const float scaled = number(format, code) * scale[place];
      made.plain[i * d_out + j] = scaled + offset[place];
      made.magnitudes[i * d_out + j] = fabsf(scaled) + fabsf(offset[place]);
    }
  }
  return made;
}

bool is_coded(Format format) { return specserve::kBits[static_cast<int>(format)] == 4; }

Weight make(Format format, const Blocks& blocks, int64_t d_in, int64_t d_out, int64_t width, int64_t tile,
            std::mt19937& random) {
  if (is_coded(format)) return make_coded(format, blocks, d_in, d_out, width, random);
  std::normal_distribution<float> normal;
  const int64_t num_panels = (d_out + width - 1) / width;
  const int64_t of_block = format == Format::kInt8 ? std::min(blocks.inputs, d_in) : d_in;
  const int64_t size = format == Format::kFloat32 ? 4 : format == Format::kBfloat16 ? 2 : 1, lanes = 4 / size;
  const int64_t num_blocks = (d_in + of_block - 1) / of_block, steps = tile ? (of_block + tile - 1) / tile : 0;
  const int64_t inputs = tile ? num_blocks * steps * tile : d_in;
  Weight made{std::vector<uint8_t>(num_panels * inputs * width * size), blocks};
  made.plain.resize(d_in * d_out), made.magnitudes.resize(d_in * d_out);
  std::vector<float> scale, offset(num_panels * num_blocks * width);
  if (format == Format::kInt8) {
    made.scale = draw(blocks.scales, num_panels, num_blocks, width, random, scale);
    if (blocks.has_offset) made.offset = draw(blocks.scales, num_panels, num_blocks, width, random, offset);
  }
  for (int64_t i = 0; i < d_in; ++i) {
    for (int64_t j = 0; j < d_out; ++j) {
      float value = normal(random);
      const int64_t panel = j / width, place = j % width, part = width / lanes;
      // outputs j and j + part share a lane of 32 bits, the first in its lowest bits
      int64_t element = ((panel * d_in + i) * part + place % part) * lanes + place / part;
      if (tile) {  // [panel, step, width / 16, tile / lanes, 16, lanes]
        const int64_t step = i / of_block * steps + i % of_block / tile, input = i % of_block % tile;
        element = (panel * inputs + step * tile) * width + (place / 16 * tile + input / lanes * lanes) * 16;
        element += place % 16 * lanes + input % lanes;
      }
      float added = 0;
      if (format == Format::kFloat32) {
        memcpy(&made.panels[element * 4], &value, 4);
      } else if (format == Format::kBfloat16) {
        const uint16_t half = upper_half(value);
        memcpy(&made.panels[element * 2], &half, 2);
        value = widened(half);
      } else {
        value = fmaxf(-127.0f, fminf(127.0f, roundf(40.0f * value)));
        made.panels[element] = static_cast<uint8_t>(static_cast<int8_t>(value));
        const int64_t at = (panel * num_blocks + i / of_block) * width + place;
        value *= scale[at], added = offset[at];
      }
      made.plain[i * d_out + j] = value + added;
      made.magnitudes[i * d_out + j] = fabsf(value) + fabsf(added);
    }
  }
  return made;
}

std::vector<float> multiply(const Kernels& kernels, Format format, const Weight& weight, const std::vector<float>& x,
                            int64_t rows, int64_t d_in, int64_t d_out) {
  std::vector<float> y(rows * d_out);
  std::vector<int32_t> order(rows);
  for (int64_t row = 0; row < rows; ++row) order[row] = static_cast<int32_t>(row);
  const int64_t start[] = {0, rows};
  Matmul call = {};
  call.x = x.data(), call.panels = weight.panels.data(), call.y = y.data(), call.rows = rows, call.groups = 1;
  call.d_in = d_in, call.d_out = d_out, call.block = d_in, call.format = format, call.order = order.data();
  call.start = start;
  if (!weight.scale.empty()) {
    call.scale = weight.scale.data(), call.offset = weight.blocks.has_offset ? weight.offset.data() : nullptr;
    call.scales = weight.blocks.scales, call.block = std::min(weight.blocks.inputs, d_in);
  }
  if (const specserve::Tiles* tiles = specserve::find_tiles(kernels, format, call.block)) {
    const int64_t num_panels = (d_out + tiles->panel_width - 1) / tiles->panel_width;
    std::vector<char> split(tiles->row_block * tiles->row_bytes(call) + 1024);
    for (int64_t begin = 0; begin < rows; begin += tiles->row_block) {
      const int64_t end = std::min(rows, begin + tiles->row_block);
      for (int64_t from = begin; from < end; from += tiles->chunk) {
        tiles->split(call, from, std::min(end, from + tiles->chunk), split.data() + (from - begin) * tiles->row_bytes(call));
      }
      tiles->matmul(call, 0, 0, num_panels, begin, end, split.data());
    }
    return y;
  }
  const int64_t width = kernels.panel_width;
  for (int64_t panel = 0; panel < (d_out + width - 1) / width; ++panel) {
    for (int64_t begin = 0; begin < rows; begin += kernels.row_block) {
      const int64_t end = std::min(rows, begin + kernels.row_block);
      kernels.matmul(call, 0, panel, begin, end);
    }
  }
  return y;
}

int check(const Kernels& kernels) {
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  int64_t checked = 0, next_blocks = 0;
  for (int number = 0; number < specserve::kFormats; ++number) {
    const Format format = static_cast<Format>(number);
    for (int64_t d_in : {1, 5, 33, 512, 1100}) {
      for (int64_t d_out : {1, 16, 17, 65, 200}) {
        const bool is_whole = kNumBlocks <= next_blocks % (2 * kNumBlocks) && !is_coded(format);
        const Blocks& blocks = is_whole ? kWhole : kBlocks[next_blocks % kNumBlocks];
        ++next_blocks;
        const int64_t of_block = specserve::kBits[number] <= 8 ? std::min(blocks.inputs, d_in) : d_in;
        const specserve::Tiles* tiles = specserve::find_tiles(kernels, format, of_block);
        const int64_t width = tiles ? tiles->panel_width : kernels.panel_width;
        const Weight weight = make(format, blocks, d_in, d_out, width, tiles ? tiles->inputs : 0, random);
        for (int64_t rows : {1, 2, 3, 4, 6, 7, 13, 49}) {
          std::vector<float> x(rows * d_in);
          for (float& value : x) value = normal(random);
          const std::vector<float> y = multiply(kernels, format, weight, x, rows, d_in, d_out);
          for (int64_t row = 0; row < rows; ++row) {
            const std::vector<float> own(x.begin() + row * d_in, x.begin() + (row + 1) * d_in);
            // how far an activation may be off that became digits (digits_isa.h): tiles of bfloat16 numbers and of
            // bytes take three of them, for all of a row, products of bytes two
            const bool has_three = tiles && tiles->inputs >= 32;
            const int64_t together = std::min({has_three ? d_in : kMostInputs, blocks.inputs, d_in});
            std::vector<double> off(d_in, 0);
            for (int64_t i = 0; tiles && i < d_in; ++i) {
              const int64_t first = i / together * together;
              for (int64_t near = first; near < std::min(d_in, first + together); ++near) {
                off[i] = std::max(off[i], fabs(double(own[near])) * (has_three ? 0x1p-23 : 0x1p-15));
              }
            }
            const std::vector<float> alone = multiply(kernels, format, weight, own, 1, d_in, d_out);
            if (memcmp(alone.data(), &y[row * d_out], d_out * sizeof(float))) {
              printf("format %d, %ld x %ld, %ld rows: row %ld depends on its neighbours\n", static_cast<int>(format),
                     long(d_in), long(d_out), long(rows), long(row));
              return 1;
            }
            for (int64_t j = 0; j < d_out; ++j, ++checked) {
              double sum = 0, magnitudes = 0, of_digits = 0;
              for (int64_t i = 0; i < d_in; ++i) {
                sum += double(own[i]) * weight.plain[i * d_out + j];
                magnitudes += fabs(double(own[i])) * weight.magnitudes[i * d_out + j];
                of_digits += off[i] * weight.magnitudes[i * d_out + j];
              }
              // of d_in terms in any order, fused or not (Higham, section 3.1), of which each may be scaled, and was
              // rounded to float32 here; and of activations that became digits
              const double bound = (d_in + 3) * kUnit / (1 - (d_in + 3) * kUnit) * magnitudes + of_digits;
              if (!(fabs(y[row * d_out + j] - sum) <= bound)) {
                printf("format %d, %ld x %ld, %ld rows: [%ld, %ld] is %g and not %g, rounding explains %g\n",
                       static_cast<int>(format), long(d_in), long(d_out), long(rows), long(row), long(j),
                       y[row * d_out + j], sum, bound);
                return 1;
              }
            }
          }
        }
      }
    }
  }
  printf("%s: %ld numbers are x @ w within what rounding explains, and no row depends on its neighbours\n",
         kernels.name, long(checked));
  return 0;
}

// Kernels with one more way to multiply.
Kernels with(Kernels kernels, const char* name, void (*use)(Kernels&)) {
  kernels.name = name;
  use(kernels);
  return kernels;
}

}  // namespace

int main() {
#if defined(__aarch64__)
  const Kernels neon = *specserve::kernels_neon(), dotprod = with(neon, "dotprod", specserve::use_dotprod);
  return check(neon) || check(dotprod);
#else
  const Kernels avx2 = *specserve::kernels_avx2();
  const Kernels avx512 = *specserve::kernels_avx512(), vnni = with(avx512, "vnni", specserve::use_vnni);
  const auto use_avxvnni = [](Kernels& kernels) { specserve::use_avxvnni(kernels); };
  return check(avx2) || check(with(avx2, "avxvnni", use_avxvnni)) || check(avx512) || check(vnni) ||
         check(with(vnni, "amx", specserve::use_amx));
#endif
}
