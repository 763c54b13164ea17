// The kernels as XLA's custom calls: checks, the choice of the instruction set, and the sharing of work among the
// threads of XLA's own pool.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#endif

#include "kernels.h"
#include "library.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace specserve {

namespace {

// So many numbers at the beginning of a line of 64 bytes, until the next call; vectors and tiles read whole lines.
template <class T>
T* in_lines(std::vector<T>& kept, int64_t size) {
  constexpr int64_t kLine = 64 / sizeof(T);
  if (static_cast<int64_t>(kept.size()) < size + kLine) kept.resize(size + kLine);
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(kept.data()) + 63) / 64 * 64);
}

// For rows as tiles take them: of the caller for all threads of its call, or of each thread for itself.
char* prepared_rows(int64_t bytes) {
  thread_local std::vector<char> kept;
  return in_lines(kept, bytes);
}

}  // namespace

float* scratch(int64_t floats) {
  thread_local std::vector<float> kept;
  return in_lines(kept, floats);
}

namespace {

#if defined(__x86_64__)
// Whether the processor has AMX's tiles of bfloat16 numbers and of bytes (bits 22, 24 and 25 of EDX; Intel's manual,
// CPUID leaf 7), and the system lets this process use them.
bool has_tiles() {
#if defined(__linux__)
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA (Linux 5.16)
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool is_there = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);
  return is_there && !syscall(SYS_arch_prctl, kRequest, kTileData);
#else
  return false;
#endif
}

// Whether the processor has AVX's own dot products of bytes (bit 4 of EAX; CPUID leaf 7, subleaf 1).
bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

// AVX2's, with products of whole numbers by these; null where the compiler did not know them.
const Kernels* kernels_avxvnni() {
  static const Kernels kernels = [] {
    Kernels made = *kernels_avx2();
    made.name = use_avxvnni(made) ? "avxvnni" : nullptr;
    return made;
  }();
  return kernels.name ? &kernels : nullptr;
}

// AVX-512's, with products of whole numbers by VNNI.
const Kernels* kernels_vnni() {
  static const Kernels kernels = [] {
    Kernels made = *kernels_avx512();
    made.name = "vnni";
    use_vnni(made);
    return made;
  }();
  return &kernels;
}

// These, with products by tiles.
const Kernels* kernels_amx() {
  static const Kernels kernels = [] {
    Kernels made = *kernels_vnni();
    made.name = "amx";
    use_amx(made);
    return made;
  }();
  return &kernels;
}
#elif defined(__aarch64__)
// Whether the processor has ARM's dot products of bytes, as every Mac of this architecture has.
bool has_dot_products() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  return true;
#endif
}

// NEON's, with products of whole numbers by dot products.
const Kernels* kernels_dotprod() {
  static const Kernels kernels = [] {
    Kernels made = *kernels_neon();
    made.name = "dotprod";
    use_dotprod(made);
    return made;
  }();
  return &kernels;
}
#endif

// What this processor can run, the fastest first.
std::vector<const Kernels*> runnable() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    const bool has_dot_products = __builtin_cpu_supports("avx512vnni");
    if (has_dot_products && has_tiles()) found.push_back(kernels_amx());
    if (has_dot_products) found.push_back(kernels_vnni());
    found.push_back(kernels_avx512());
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    if (has_avx_vnni() && kernels_avxvnni()) found.push_back(kernels_avxvnni());
    found.push_back(kernels_avx2());
  }
#elif defined(__aarch64__)
  if (has_dot_products()) found.push_back(kernels_dotprod());
  found.push_back(kernels_neon());
#endif
  return found;
}

std::atomic<const Kernels*>& chosen_kernels() {
  static std::atomic<const Kernels*> chosen{runnable().empty() ? nullptr : runnable().front()};
  return chosen;
}

const Kernels* kernels() { return chosen_kernels().load(std::memory_order_relaxed); }

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Units of work that threads take one after another, each from a range of its own while that lasts, so that it reads
// memory in order, and then from the others'. The caller takes part, and waits only for units that another thread has
// begun: a thread that wakes up late finds nothing left, so no call waits for the operating system. Each thread that finds
// something prepares for it once.
struct Shared {
  Shared(int64_t threads, int64_t units, int64_t at_once, std::function<void(int64_t, int64_t)> run,
         std::function<void()> prepare)
      : units(units), ranges(threads), run(std::move(run)), prepare(std::move(prepare)) {
    for (int64_t i = 0; i < threads; ++i) {
      ranges[i].next = i * units / threads;
      ranges[i].end = (i + 1) * units / threads;
      ranges[i].step = std::max(at_once, units / (threads * 8));
    }
  }
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end, step;
  };
  const int64_t units;
  std::vector<Range> ranges;
  const std::function<void(int64_t, int64_t)> run;
  const std::function<void()> prepare;
  std::atomic<int64_t> joined{0}, done{0};
  std::mutex mutex;
  std::condition_variable all_done;

  // Returns whether there was a place for the thread: no more help than the work is worth.
  bool work() {
    const size_t first = joined.fetch_add(1);
    if (first >= ranges.size()) return false;
    bool is_prepared = false;
    for (size_t i = 0; i < ranges.size(); ++i) {
      Range& range = ranges[(first + i) % ranges.size()];
      while (true) {
        const int64_t begin = range.next.fetch_add(range.step);
        if (begin >= range.end) break;
        const int64_t end = std::min(range.end, begin + range.step);
        if (!is_prepared) prepare(), is_prepared = true;
        run(begin, end);
        if (done.fetch_add(end - begin) + (end - begin) == units) {
          std::lock_guard<std::mutex> lock(mutex);
          all_done.notify_all();
        }
      }
    }
    return true;
  }

  void wait() {
    // what is left takes microseconds: look a while before sleeping
    for (int i = 0; i < 20000 && done.load() < units; ++i) pause();
    std::unique_lock<std::mutex> lock(mutex);
    all_done.wait(lock, [&] { return done.load() == units; });
  }
};

constexpr int64_t kWorthAThread = 1 << 14;  // multiplications, some microseconds: what waking a thread costs

// Threads that have helped with a call stay a while for the next one, which mostly comes within microseconds. One that
// goes to sleep wakes up too late, by milliseconds where another process has its core. Nobody waits for them, and one
// whose core was taken away while it stayed goes to sleep: others need the core more.
class Helpers {
 public:
  // Has so many threads of the pool help with a call, if they come in time.
  void help(ffi::ThreadPool& pool, int64_t threads, const std::shared_ptr<Shared>& shared) {
    int64_t asked = 0;
    uint64_t call = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      latest_ = shared;
      call = calls_.fetch_add(1, std::memory_order_release) + 1;
      asked = std::max<int64_t>(0, threads - staying_);
      staying_ += asked;
    }
    for (; asked > 0; --asked) pool.Schedule([this, shared, call] { stay(shared, call); });
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kWhile = std::chrono::microseconds(50);
  static constexpr auto kLost = std::chrono::microseconds(20);  // between two looks: another thread had the core

  // Helps with a call, then with the ones that come meanwhile, and leaves when one has no place for it.
  void stay(std::shared_ptr<Shared> shared, uint64_t seen) {
    while (true) {
      const bool had_place = shared->work();
      shared.reset();
      const auto begin = Clock::now();
      for (auto last = begin, now = begin; had_place && calls_.load(std::memory_order_acquire) == seen; last = now) {
        pause();
        now = Clock::now();
        if (now - begin > kWhile || now - last > kLost) break;
      }
      std::lock_guard<std::mutex> lock(mutex_);
      const uint64_t calls = calls_.load(std::memory_order_relaxed);
      if (calls == seen) {
        --staying_;
        return;
      }
      seen = calls, shared = latest_;
    }
  }

  std::mutex mutex_;
  std::shared_ptr<Shared> latest_;
  std::atomic<uint64_t> calls_{0};
  int64_t staying_ = 0;  // threads that stay, or were asked to come
};

// A thread takes so many units at once at least.
void share(ffi::ThreadPool& pool, int64_t units, int64_t work_per_unit, std::function<void(int64_t, int64_t)> run,
           std::function<void()> prepare = [] {}, int64_t at_once = 1) {
  static Helpers& helpers = *new Helpers;  // never destroyed: a thread may be waiting when the process ends
  const int64_t threads = std::min({pool.num_threads(), units, units * work_per_unit / kWorthAThread});
  if (threads <= 1) return prepare(), run(0, units);
  auto shared = std::make_shared<Shared>(threads, units, at_once, std::move(run), std::move(prepare));
  helpers.help(pool, threads - 1, shared);
  shared->work();
  shared->wait();
}

ffi::Error refuse(const std::string& why) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, why); }

template <class T, class Buffer>
const T* data_or_null(const Buffer& buffer) {
  return buffer.element_count() ? reinterpret_cast<const T*>(buffer.untyped_data()) : nullptr;
}

// Whether numbers are all zero, as are the rows of tokens that only fill a batch, a chunk or a tree. Such rows stay zeros
// in products and gates, and nothing is computed of them.
bool is_zero(const float* numbers, int64_t count) {
  constexpr int64_t kBlock = 32;
  uint32_t bits[kBlock] = {};
  const auto add = [&](int64_t begin, int64_t size) {
    uint32_t block[kBlock];
    std::memcpy(block, numbers + begin, size * sizeof(float));
    for (int64_t i = 0; i < size; ++i) bits[i] |= block[i];
    uint32_t any = 0;
    for (int64_t i = 0; i < size; ++i) any |= bits[i];
    return any << 1;  // but for the sign
  };
  int64_t begin = 0;
  for (; begin + kBlock <= count; begin += kBlock) {
    if (add(begin, kBlock)) return false;
  }
  return !add(begin, count - begin);
}

ffi::Error matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> group, ffi::AnyBuffer panels,
                  ffi::AnyBuffer scale, ffi::AnyBuffer offset, ffi::Buffer<ffi::F32> add,
                  ffi::Result<ffi::Buffer<ffi::F32>> y, int64_t block, int64_t format) {
  const Kernels* chosen = kernels();
  if (!chosen) return refuse("no kernel for this processor");
  const auto x_dims = x.dimensions(), dims = panels.dimensions(), y_dims = y->dimensions();
  if (x_dims.size() != 2 || dims.size() != 4 || y_dims.size() != 2) return refuse("ranks of a product");
  Matmul call = {};
  call.x = x.typed_data();
  if (group.element_count() && add.element_count()) return refuse("rows of experts are added to nothing");
  call.group = data_or_null<int32_t>(group);
  call.panels = panels.untyped_data();
  call.scale = data_or_null<void>(scale);
  call.offset = data_or_null<void>(offset);
  const auto scale_type = scale.element_type();
  call.scales = scale_type == ffi::U8    ? Scales::kTwoLevels
                : scale_type == ffi::F16 ? Scales::kFloat16
                                         : Scales::kFloat32;
  call.add = data_or_null<float>(add);
  call.y = y->typed_data();
  call.rows = x_dims[0], call.d_in = x_dims[1], call.d_out = y_dims[1], call.groups = dims[0];
  call.block = block > 0 ? block : std::max<int64_t>(1, call.d_in);
  if (format < 0 || format >= kFormats) return refuse("format of a packed matrix");
  call.format = static_cast<Format>(format);
  const Tiles* tiles = find_tiles(*chosen, call.format, std::min(call.block, call.d_in));
  const int64_t width = tiles ? tiles->panel_width : chosen->panel_width;
  const int64_t row_block = tiles ? tiles->row_block : chosen->row_block;
  const int64_t num_panels = (call.d_out + width - 1) / width;
  const int64_t num_blocks = (call.d_in + call.block - 1) / call.block, bits = kBits[format];
  if (bits < 8 && !tiles) return refuse("codes of 4 bits are multiplied by tiles");
  int64_t inputs = call.d_in;  // with those that fill blocks up to whole tiles
  if (tiles && call.d_in) {
    inputs = num_blocks * ((std::min(call.block, call.d_in) + tiles->inputs - 1) / tiles->inputs) * tiles->inputs;
  }
  const int64_t held = bits < 8 ? inputs / 2 : inputs;  // bytes of 4-bit codes, else numbers
  const int64_t of_output = call.scales == Scales::kTwoLevels ? (num_blocks + kTogether - 1) / kTogether * kSuperBytes
                                                              : num_blocks;
  const size_t scales = call.groups * num_panels * of_output * width;
  if (dims[1] != num_panels || dims[2] != held || dims[3] != width || y_dims[0] != call.rows ||
      panels.size_bytes() != static_cast<size_t>(call.groups * num_panels * held * width * std::max<int64_t>(bits, 8) / 8) ||
      (call.scale && scale.element_count() != scales) || (call.offset && offset.element_count() != scales) ||
      (call.scale && call.scales == Scales::kFloat32 && scale_type != ffi::F32) || (bits < 16 && !call.scale) ||
      (call.offset && offset.element_type() != scale_type) ||
      (call.add && add.element_count() != y->element_count())) {
    return refuse("shapes of a product");
  }
  // rows by group, each group's in their own order
  std::vector<int32_t> order(call.rows);
  std::vector<int64_t> start(call.groups + 1, 0);
  // the group of each row, -1 where nothing is multiplied
  std::vector<int64_t> of_row(call.rows, 0);
  for (int64_t r = 0; r < call.rows; ++r) {
    if (call.group) of_row[r] = 0 <= call.group[r] && call.group[r] < call.groups ? call.group[r] : -1;
    if (is_zero(call.x + r * call.d_in, call.d_in)) of_row[r] = -1;
    if (of_row[r] >= 0) {
      ++start[of_row[r] + 1];
    } else if (call.add) {
      std::copy_n(call.add + r * call.d_out, call.d_out, call.y + r * call.d_out);
    } else {
      std::fill_n(call.y + r * call.d_out, call.d_out, 0.0f);
    }
  }
  std::partial_sum(start.begin(), start.end(), start.begin());
  std::vector<int64_t> place(start.begin(), start.end() - 1);
  for (int64_t r = 0; r < call.rows; ++r) {
    if (of_row[r] >= 0) order[place[of_row[r]]++] = static_cast<int32_t>(r);
  }
  call.order = order.data(), call.start = start.data();
  struct Part {
    int64_t group, begin, end;
  };
  std::vector<Part> parts, chunks;
  for (int64_t g = 0; g < call.groups; ++g) {
    for (int64_t begin = start[g]; begin < start[g + 1]; begin += row_block) {
      const int64_t end = std::min(start[g + 1], begin + row_block);
      parts.push_back({g, begin, end});
      for (int64_t row = begin; tiles && row < end; row += tiles->chunk) {
        chunks.push_back({g, row, std::min(end, row + tiles->chunk)});
      }
    }
  }
  const int64_t rows_at_once = std::min<int64_t>(call.rows, row_block), per_row = tiles ? tiles->row_bytes(call) : 0;
  const int64_t prepared = tiles ? call.rows * per_row + 1024 : 0, num_chunks = chunks.size();
  const auto split = [&](char* to, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      tiles->split(call, chunks[i].begin, chunks[i].end, to + chunks[i].begin * per_row);
    }
  };
  // Few rows are split by each thread for itself: one thread's lines of the cache would reach the others one by one, and
  // have to be taken back from them at the next call, which takes several times as long.
  const bool is_apart = num_chunks * rows_at_once * call.d_in < 2 * kWorthAThread;
  char* const of_all = tiles && !is_apart ? prepared_rows(prepared) : nullptr;
  if (of_all) {
    share(pool, num_chunks, rows_at_once * call.d_in, [&](int64_t begin, int64_t end) { split(of_all, begin, end); });
  }
  const auto prepare = [&] {
    if (tiles && is_apart) split(prepared_rows(prepared), 0, num_chunks);
  };
  // panels of one part follow each other, so that a thread reads memory in order
  const auto multiply = [&](int64_t begin, int64_t end) {
    const char* rows = tiles && is_apart ? prepared_rows(prepared) : of_all;
    for (int64_t unit = begin, next; unit < end; unit = next) {
      next = std::min(end, (unit / num_panels + 1) * num_panels);  // of one part
      const Part& part = parts[unit / num_panels];
      const int64_t first = unit % num_panels, last = first + next - unit;
      if (tiles) {
        tiles->matmul(call, part.group, first, last, part.begin, part.end, rows + part.begin * per_row);
        continue;
      }
      for (int64_t panel = first; panel < last; ++panel) {
        chosen->matmul(call, part.group, panel, part.begin, part.end);
      }
    }
  };
  const int64_t units = static_cast<int64_t>(parts.size()) * num_panels, at_once = num_chunks > 1 && tiles ? tiles->panels : 1;
  share(pool, units, rows_at_once * call.d_in * width, multiply, prepare, at_once);
  return ffi::Error::Success();
}

// Sets how pages of a dtype keep their numbers. Returns whether they may be of it.
bool find_stored(ffi::DataType dtype, Stored& stored) {
  stored = dtype == ffi::BF16       ? Stored::kBfloat16
           : dtype == ffi::S8       ? Stored::kInt8
           : dtype == ffi::F8E4M3FN ? Stored::kFloat8
                                    : Stored::kFloat32;
  return stored != Stored::kFloat32 || dtype == ffi::F32;
}

ffi::Error attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v,
                  ffi::Buffer<ffi::PRED> mask, ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages,
                  ffi::Buffer<ffi::F32> k_scale, ffi::Buffer<ffi::F32> v_scale, ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> lens, ffi::Buffer<ffi::S32> positions,
                  ffi::Buffer<ffi::F32> sinks, ffi::Result<ffi::Buffer<ffi::F32>> out, float scale, float softcap,
                  int64_t first, int64_t window) {
  const Kernels* chosen = kernels();
  if (!chosen) return refuse("no kernel for this processor");
  const auto q_dims = q.dimensions(), v_dims = v.dimensions(), page_dims = k_pages.dimensions();
  if (q_dims.size() != 4 || v_dims.size() != 4 || page_dims.size() != 4) return refuse("ranks of attention");
  Attend call = {};
  call.q = q.typed_data(), call.k = k.typed_data(), call.v = v.typed_data();
  call.mask = reinterpret_cast<const uint8_t*>(mask.untyped_data());
  call.k_pages = k_pages.untyped_data(), call.v_pages = data_or_null<void>(v_pages);
  call.k_scale = data_or_null<float>(k_scale), call.v_scale = data_or_null<float>(v_scale);
  call.page_table = page_table.typed_data(), call.lens = lens.typed_data();
  call.positions = data_or_null<int32_t>(positions), call.sinks = data_or_null<float>(sinks);
  call.out = out->typed_data();
  call.batch = q_dims[0], call.n = q_dims[1], call.heads = q_dims[2], call.head_dim = q_dims[3];
  call.m = v_dims[1], call.kv_heads = v_dims[2], call.v_dim = v_dims[3];
  call.num_pages = page_dims[0], call.page_size = page_dims[3], call.width = page_table.dimensions()[1];
  call.has_batched_mask = mask.dimensions()[0] != 1;
  call.scale = scale, call.softcap = softcap, call.first = first, call.window = window;
  if (!find_stored(k_pages.element_type(), call.stored) ||
      (call.v_pages && v_pages.element_type() != k_pages.element_type())) {
    return refuse("dtype of pages");
  }
  const size_t scales = call.stored < Stored::kInt8 ? 0 : call.num_pages * call.kv_heads * call.page_size;
  if (k_scale.element_count() != scales || v_scale.element_count() != (call.v_pages ? scales : 0)) {
    return refuse("scales of pages");
  }
  if (call.window && static_cast<int64_t>(positions.element_count()) != call.batch * call.m) {
    return refuse("a window goes by the new keys' positions");
  }
  const int64_t group = call.heads / call.kv_heads;
  const int64_t at_once = std::max<int64_t>(1, std::min(call.n, 32 / group));  // queries of a unit
  const int64_t blocks = (call.n + at_once - 1) / at_once, units = call.batch * call.kv_heads * blocks;
  int64_t longest = 0;
  for (int64_t b = 0; b < call.batch; ++b) longest = std::max<int64_t>(longest, call.lens[b]);
  share(pool, units, 2 * at_once * group * (longest + call.m) * call.head_dim,
        [&call, chosen, blocks, at_once](int64_t begin, int64_t end) {
          for (int64_t unit = begin; unit < end; ++unit) {
            const int64_t from = unit % blocks * at_once, pair = unit / blocks;
            chosen->attend(call, pair / call.kv_heads, pair % call.kv_heads, from, std::min(call.n, from + at_once));
          }
        });
  return ffi::Error::Success();
}

int64_t num_rows(ffi::AnyBuffer::Dimensions dims) {
  return std::accumulate(dims.begin(), dims.end() - 1, int64_t{1}, std::multiplies<int64_t>());
}

ffi::Error norm(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> weight,
                ffi::Result<ffi::Buffer<ffi::F32>> y, float eps, bool offset) {
  const Kernels* chosen = kernels();
  const auto dims = x.dimensions();
  const int64_t size = dims.back();
  if (!chosen || static_cast<int64_t>(weight.element_count()) != size) return refuse("shapes of a norm");
  const Norm call = {x.typed_data(), weight.typed_data(), y->typed_data(), size, eps, offset};
  share(pool, num_rows(dims), 2 * size, [&](int64_t begin, int64_t end) { chosen->norm(call, begin, end); });
  return ffi::Error::Success();
}

// `up` is empty where the rows of `gate` hold both side by side.
ffi::Error gate(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> gate, ffi::Buffer<ffi::F32> up,
                ffi::Result<ffi::Buffer<ffi::F32>> y, int64_t activation) {
  const Kernels* chosen = kernels();
  const auto dims = y->dimensions();
  const int64_t size = dims.back();
  if (!chosen || activation < 0 || activation > 2) return refuse("activation");
  const float* second = up.element_count() ? up.typed_data() : gate.typed_data() + size;
  const Gate call = {gate.typed_data(), second, y->typed_data(), size, gate.dimensions().back(),
                     static_cast<Activation>(activation)};
  share(pool, num_rows(dims), 16 * size, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (is_zero(call.gate + row * call.stride, size)) {
        std::fill_n(call.y + row * size, size, 0.0f);
      } else {
        chosen->gate(call, row, row + 1);
      }
    }
  });
  return ffi::Error::Success();
}

ffi::Error rotate(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                  ffi::Result<ffi::Buffer<ffi::F32>> y, bool is_interleaved) {
  const Kernels* chosen = kernels();
  const auto dims = x.dimensions();  // [..., head, head_dim]
  if (!chosen || dims.size() < 3) return refuse("ranks of a rotation");
  const int64_t heads = dims[dims.size() - 2], head_dim = dims.back(), half = cos.dimensions().back();
  const int64_t rows = num_rows(dims) / heads;
  if (static_cast<int64_t>(cos.element_count()) != rows * half || 2 * half > head_dim) return refuse("shapes of a rotation");
  const Rotate call = {x.typed_data(), cos.typed_data(), sin.typed_data(), y->typed_data(), heads, head_dim, half,
                       is_interleaved};
  share(pool, rows, 4 * heads * head_dim, [&](int64_t begin, int64_t end) { chosen->rotate(call, begin, end); });
  return ffi::Error::Success();
}

// The rows of one product, [q | k | v] side by side, as heads: queries and keys normed, where their norms are not empty,
// and turned; values as they are. A norm is over each head, or over all of them where its weight is as long.
ffi::Error heads(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> qkv, ffi::Buffer<ffi::F32> q_norm,
                 ffi::Buffer<ffi::F32> k_norm, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                 ffi::Result<ffi::Buffer<ffi::F32>> q, ffi::Result<ffi::Buffer<ffi::F32>> k,
                 ffi::Result<ffi::Buffer<ffi::F32>> v, float eps, bool offset, bool is_interleaved) {
  const Kernels* chosen = kernels();
  const auto q_dims = q->dimensions(), k_dims = k->dimensions();  // [batch, n, head, head_dim]
  if (!chosen || q_dims.size() != 4 || k_dims.size() != 4) return refuse("ranks of heads");
  const int64_t head_dim = q_dims[3], half = cos.dimensions().back(), rows = q_dims[0] * q_dims[1];
  const int64_t q_size = q_dims[2] * head_dim, kv_size = k_dims[2] * head_dim, size = q_size + 2 * kv_size;
  if (static_cast<int64_t>(qkv.element_count()) != rows * size ||
      static_cast<int64_t>(cos.element_count()) != rows * half || 2 * half > head_dim) {
    return refuse("shapes of heads");
  }
  struct Part {
    const ffi::Buffer<ffi::F32>& norm;
    float* to;
    int64_t begin, size;
  };
  const Part parts[] = {{q_norm, q->typed_data(), 0, q_size}, {k_norm, k->typed_data(), q_size, kv_size}};
  for (const Part& part : parts) {
    const int64_t length = part.norm.element_count();
    if (length && length != head_dim && length != part.size) return refuse("shape of a norm of heads");
  }
  share(pool, rows, 8 * size, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (const Part& part : parts) {
        const float* from = qkv.typed_data() + row * size + part.begin;
        float* to = part.to + row * part.size;
        if (const int64_t length = part.norm.element_count()) {
          chosen->norm({from, part.norm.typed_data(), to, length, eps, offset}, 0, part.size / length);
          from = to;
        }
        const Rotate turn = {from, cos.typed_data() + row * half, sin.typed_data() + row * half, to,
                             part.size / head_dim, head_dim, half, is_interleaved};
        chosen->rotate(turn, 0, 1);
      }
      std::copy_n(qkv.typed_data() + row * size + q_size + kv_size, kv_size, v->typed_data() + row * kv_size);
    }
  });
  return ffi::Error::Success();
}

// One array of pages and the new entries for it.
struct PageArray {
  const float* entries;  // [batch, n, head, dim]
  void* pages;           // [page, head, dim, size] of keys, [page, head, size, dim] of values
  float* scale;          // [page, head, size], of 8-bit pages
  Stored stored;
  bool is_key;
  int64_t n, heads, dim, num_pages, size;
};

// Writes entries of one sequence, of which the places that follow one another in a page are written together: keys lie
// in columns, so that one at a time would touch a line of the cache for every number.
template <class T>
void write_sequence(const PageArray& into, int64_t sequence, int64_t count, const int32_t* path, const int32_t* page,
                    const int32_t* offset) {
  constexpr int64_t kMost = 32;
  const int64_t width = into.heads * into.dim;
  const float* const first = into.entries + sequence * into.n * width;
  const auto is_somewhere = [&](int64_t i) {
    return page[i] >= 0 && page[i] < into.num_pages && offset[i] >= 0 && offset[i] < into.size && path[i] >= 0 &&
           path[i] < into.n;
  };
  for (int64_t i = 0, run; i < count; i += run) {
    run = 1;
    if (!is_somewhere(i)) continue;
    const float* from[kMost] = {first + path[i] * width};
    while (run < kMost && i + run < count && is_somewhere(i + run) && page[i + run] == page[i] &&
           offset[i + run] == offset[i] + run) {
      from[run] = first + path[i + run] * width;
      ++run;
    }
    T* to = static_cast<T*>(into.pages) + page[i] * width * into.size + offset[i] * (into.is_key ? 1 : into.dim);
    for (int64_t head = 0; head < into.heads; ++head, to += into.dim * into.size) {
      float inverse[kMost];
      if constexpr (kLargest<T> > 0.0f) {
        for (int64_t j = 0; j < run; ++j) {
          const float scale = scale_of<T>(from[j] + head * into.dim, into.dim);
          into.scale[(page[i] * into.heads + head) * into.size + offset[i] + j] = scale;
          inverse[j] = 1.0f / scale;
        }
      }
      if (into.is_key) {
        for (int64_t channel = 0; channel < into.dim; ++channel) {
          for (int64_t j = 0; j < run; ++j) {
            const float value = from[j][head * into.dim + channel];
            keep(kLargest<T> > 0.0f ? value * inverse[j] : value, to + channel * into.size + j);
          }
        }
        continue;
      }
      for (int64_t j = 0; j < run; ++j) {
        for (int64_t channel = 0; channel < into.dim; ++channel) {
          const float value = from[j][head * into.dim + channel];
          keep(kLargest<T> > 0.0f ? value * inverse[j] : value, to + j * into.dim + channel);
        }
      }
    }
  }
}

// Writes entries into the pages of every layer: the path[b][i]-th of the new ones of sequence b goes to page[b][i],
// offset[b][i]; a page out of range is nowhere. The operands after these three are the pages, keys of all layers and then
// values, then the scales of each where they are of 8 bits, and after them the new entries in the order of the pages,
// [batch, n, head, dim]. The results are pages and scales, in place. Values without heads, [page, size, dim] or
// [page, dim], have entries [batch, n, dim].
ffi::Error write(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> path, ffi::Buffer<ffi::S32> page,
                 ffi::Buffer<ffi::S32> offset, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                 int64_t num_keys) {
  const int64_t num_results = results.size(), num_arrays = arguments.size() - num_results;
  const int64_t batch = page.dimensions()[0], count = page.dimensions()[1];
  if (num_arrays != num_results && 2 * num_arrays != num_results) return refuse("arrays of a write");
  std::vector<PageArray> arrays;
  for (int64_t i = 0; i < num_arrays; ++i) {
    auto entries = arguments.get<ffi::Buffer<ffi::F32>>(num_results + i);
    auto pages = results.get<ffi::AnyBuffer>(i);
    Stored stored;
    if (!entries.has_value() || !pages.has_value() || !find_stored((*pages)->element_type(), stored)) {
      return refuse("dtype of pages");
    }
    const auto dims = entries->dimensions(), page_dims = (*pages)->dimensions();
    const size_t rank = page_dims.size();
    const bool is_key = i < num_keys;
    if (rank < 2 || rank > 4 || dims.size() != (rank == 4 ? 4 : 3) || (is_key && rank != 4)) {
      return refuse("ranks of a write");
    }
    const int64_t heads = rank == 4 ? dims[2] : 1, size = rank == 2 ? 1 : page_dims[is_key ? rank - 1 : rank - 2];
    if (dims[0] != batch || (rank == 4 && page_dims[1] != heads) ||
        page_dims[is_key ? rank - 2 : rank - 1] != dims.back()) {
      return refuse("shapes of a write");
    }
    float* scale = nullptr;
    if (stored >= Stored::kInt8) {
      if (num_results == num_arrays) return refuse("pages of 8 bits without scales");
      auto of_pages = results.get<ffi::Buffer<ffi::F32>>(num_arrays + i);
      if (!of_pages.has_value() ||
          static_cast<int64_t>((*of_pages)->element_count()) != page_dims[0] * heads * size) {
        return refuse("scales of pages");
      }
      scale = (*of_pages)->typed_data();
    }
    arrays.push_back({entries->typed_data(), (*pages)->untyped_data(), scale, stored, is_key, dims[1], heads,
                      dims.back(), page_dims[0], size});
  }
  if (arrays.empty()) return ffi::Error::Success();
  using Write = decltype(&write_sequence<float>);
  constexpr Write kWrites[] = {write_sequence<float>, write_sequence<PageBfloat16>, write_sequence<int8_t>,
                               write_sequence<PageFloat8>};
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t sequence = unit % batch, at = sequence * count;
      const PageArray& into = arrays[unit / batch];
      kWrites[static_cast<int>(into.stored)](into, sequence, count, path.typed_data() + at, page.typed_data() + at,
                                             offset.typed_data() + at);
    }
  };
  // a number of a key is a line of the cache, where a product's is a multiply-add
  share(pool, num_arrays * batch, 16 * count * arrays[0].heads * arrays[0].dim, run);
  return ffi::Error::Success();
}

ffi::Error argmax(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Result<ffi::Buffer<ffi::S32>> index) {
  const Kernels* chosen = kernels();
  const auto dims = x.dimensions();
  if (!chosen || !dims.back()) return refuse("shape of a largest value");
  const Argmax call = {x.typed_data(), index->typed_data(), dims.back()};
  share(pool, num_rows(dims), dims.back(), [&](int64_t begin, int64_t end) { chosen->argmax(call, begin, end); });
  return ffi::Error::Success();
}

// cos and sin of position * frequency, [row, frequency] each; a function of its own because XLA computes one row's
// cosines by another formula than those of many rows.
ffi::Error angles(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::F32> frequencies,
                  ffi::Result<ffi::Buffer<ffi::F32>> cos, ffi::Result<ffi::Buffer<ffi::F32>> sin, float magnitude) {
  const int64_t size = frequencies.element_count();
  share(pool, positions.element_count(), 100 * size, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float position = static_cast<float>(positions.typed_data()[row]);
      for (int64_t i = 0; i < size; ++i) {
        const float angle = position * frequencies.typed_data()[i];
        cos->typed_data()[row * size + i] = std::cos(angle) * magnitude;
        sin->typed_data()[row * size + i] = std::sin(angle) * magnitude;
      }
    }
  });
  return ffi::Error::Success();
}

const Tiles* tiles_of(const Kernels* chosen, int64_t format, int64_t block) {
  return chosen && 0 <= format && format < kFormats ? find_tiles(*chosen, static_cast<Format>(format), block) : nullptr;
}

}  // namespace
}  // namespace specserve

SPECSERVE_EXPORT const char* specserve_kernels_instruction_set() {
  const specserve::Kernels* chosen = specserve::kernels();
  return chosen ? chosen->name : "none";
}

// Uses the kernels of this name from now on; 0 where the processor cannot run them. Matrices that are packed for others
// are refused.
SPECSERVE_EXPORT int64_t specserve_kernels_use(const char* name) {
  for (const specserve::Kernels* each : specserve::runnable()) {
    if (std::string(each->name) != name) continue;
    specserve::chosen_kernels() = each;
    return 1;
  }
  return 0;
}

// Outputs of a panel of a weight in this format (kernels.h), of which so many inputs share a scale, at most all.
SPECSERVE_EXPORT int64_t specserve_kernels_panel_width(int64_t format, int64_t block) {
  const specserve::Kernels* chosen = specserve::kernels();
  const specserve::Tiles* tiles = specserve::tiles_of(chosen, format, block);
  return tiles ? tiles->panel_width : chosen ? chosen->panel_width : 0;
}

// Inputs of a tile of such a weight, 0 where it is not multiplied by tiles.
SPECSERVE_EXPORT int64_t specserve_kernels_tile_inputs(int64_t format, int64_t block) {
  const specserve::Tiles* tiles = specserve::tiles_of(specserve::kernels(), format, block);
  return tiles ? tiles->inputs : 0;
}

SPECSERVE_HANDLER(specserve_matmul, specserve::matmul,
                  ffi::Ffi::Bind()
                      .Ctx<ffi::ThreadPool>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Arg<ffi::Buffer<ffi::S32>>()
                      .Arg<ffi::AnyBuffer>()
                      .Arg<ffi::AnyBuffer>()
                      .Arg<ffi::AnyBuffer>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Ret<ffi::Buffer<ffi::F32>>()
                      .Attr<int64_t>("block")
                      .Attr<int64_t>("format"));

SPECSERVE_HANDLER(specserve_attend, specserve::attend,
                  ffi::Ffi::Bind()
                      .Ctx<ffi::ThreadPool>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Arg<ffi::Buffer<ffi::PRED>>()
                      .Arg<ffi::AnyBuffer>()
                      .Arg<ffi::AnyBuffer>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Arg<ffi::Buffer<ffi::S32>>()
                      .Arg<ffi::Buffer<ffi::S32>>()
                      .Arg<ffi::Buffer<ffi::S32>>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Ret<ffi::Buffer<ffi::F32>>()
                      .Attr<float>("scale")
                      .Attr<float>("softcap")
                      .Attr<int64_t>("first")
                      .Attr<int64_t>("window"));

SPECSERVE_HANDLER(specserve_norm, specserve::norm,
                  ffi::Ffi::Bind()
                      .Ctx<ffi::ThreadPool>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Ret<ffi::Buffer<ffi::F32>>()
                      .Attr<float>("eps")
                      .Attr<bool>("offset"));

SPECSERVE_HANDLER(specserve_gate, specserve::gate,
                  ffi::Ffi::Bind()
                      .Ctx<ffi::ThreadPool>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Ret<ffi::Buffer<ffi::F32>>()
                      .Attr<int64_t>("activation"));

SPECSERVE_HANDLER(specserve_rotate, specserve::rotate,
                  ffi::Ffi::Bind()
                      .Ctx<ffi::ThreadPool>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Ret<ffi::Buffer<ffi::F32>>()
                      .Attr<bool>("is_interleaved"));

SPECSERVE_HANDLER(specserve_angles, specserve::angles,
                  ffi::Ffi::Bind()
                      .Ctx<ffi::ThreadPool>()
                      .Arg<ffi::Buffer<ffi::S32>>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Ret<ffi::Buffer<ffi::F32>>()
                      .Ret<ffi::Buffer<ffi::F32>>()
                      .Attr<float>("magnitude"));

SPECSERVE_HANDLER(specserve_heads, specserve::heads,
                  ffi::Ffi::Bind()
                      .Ctx<ffi::ThreadPool>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .Ret<ffi::Buffer<ffi::F32>>()
                      .Ret<ffi::Buffer<ffi::F32>>()
                      .Ret<ffi::Buffer<ffi::F32>>()
                      .Attr<float>("eps")
                      .Attr<bool>("offset")
                      .Attr<bool>("is_interleaved"));

SPECSERVE_HANDLER(specserve_write, specserve::write,
                  ffi::Ffi::Bind()
                      .Ctx<ffi::ThreadPool>()
                      .Arg<ffi::Buffer<ffi::S32>>()
                      .Arg<ffi::Buffer<ffi::S32>>()
                      .Arg<ffi::Buffer<ffi::S32>>()
                      .RemainingArgs()
                      .RemainingRets()
                      .Attr<int64_t>("num_keys"));

SPECSERVE_HANDLER(specserve_argmax, specserve::argmax,
                  ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::S32>>());
