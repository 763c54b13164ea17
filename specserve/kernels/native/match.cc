// The search for a sequence's last tokens in texts (kernels/match.py).

#include <algorithm>
#include <cstdint>

#include "library.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace specserve {
namespace {

// Whether a token is among so many.
bool has_token(const int32_t* tokens, int64_t count, int32_t token) {
  int32_t any = 0;
  for (int64_t i = 0; i < count; ++i) any |= -static_cast<int32_t>(tokens[i] == token);
  return any;
}

struct Longest {
  int32_t length = 0, index = 0;
};

// Searches one row, of which `base` tokens come before in other rows, for a match that is no shorter.
void search_row(const int32_t* text, int64_t size, int64_t end, int64_t base, const int32_t* suffix, int64_t most,
                Longest& best) {
  constexpr int64_t kBlock = 64;  // most blocks have no token that a match could end with
  end = std::min(end, size - 1);
  for (int64_t begin = 0; begin < end; begin += kBlock) {
    const int64_t stop = std::min(begin + kBlock, end);
    if (!has_token(text + begin, stop - begin, suffix[0])) continue;
    for (int64_t at = begin; at < stop; ++at) {
      if (text[at] != suffix[0] || text[at + 1] < 0) continue;
      int32_t length = 1;
      while (length < most && length <= at && text[at - length] == suffix[length]) ++length;
      if (length >= best.length) best = {length, static_cast<int32_t>(base + at)};
    }
  }
}

// A text without a match gives length 0 and the index of the last token.
ffi::Error longest_match(ffi::Buffer<ffi::S32> text, ffi::Buffer<ffi::S32> suffix, ffi::Buffer<ffi::S32> ends,
                         ffi::Result<ffi::Buffer<ffi::S32>> length, ffi::Result<ffi::Buffer<ffi::S32>> index) {
  const auto dims = text.dimensions(), of_suffix = suffix.dimensions(), of_ends = ends.dimensions();
  const auto fits = [](int64_t size, int64_t batch) { return size == 1 || size == batch; };
  if (dims.size() != 3 || of_suffix.size() != 2 || of_ends.size() != 2 || !fits(dims[0], of_suffix[0]) ||
      !fits(of_ends[0], of_suffix[0]) || of_ends[1] != dims[1] || !of_suffix[1] || !dims[2]) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "shapes of a search");
  }
  const int64_t rows = dims[1], size = dims[2];
  for (int64_t b = 0; b < of_suffix[0]; ++b) {
    const int32_t* const own = text.typed_data() + (dims[0] > 1 ? b : 0) * rows * size;
    const int32_t* const end = ends.typed_data() + (of_ends[0] > 1 ? b : 0) * rows;
    Longest best = {0, static_cast<int32_t>(rows * size - 1)};
    for (int64_t row = 0; row < rows; ++row) {
      search_row(own + row * size, size, end[row], row * size, suffix.typed_data() + b * of_suffix[1], of_suffix[1], best);
    }
    length->typed_data()[b] = best.length, index->typed_data()[b] = best.index;
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace specserve

SPECSERVE_HANDLER(specserve_longest_match, specserve::longest_match,
                  ffi::Ffi::Bind()
                      .Arg<ffi::Buffer<ffi::S32>>()
                      .Arg<ffi::Buffer<ffi::S32>>()
                      .Arg<ffi::Buffer<ffi::S32>>()
                      .Ret<ffi::Buffer<ffi::S32>>()
                      .Ret<ffi::Buffer<ffi::S32>>());
