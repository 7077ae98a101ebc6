// Where results live. Past a few MB a fresh block is mapped, faulted in page by page and unmapped again by malloc, which
// takes longer than the arithmetic; so large blocks that come back are kept, up to a limit, and given out again.
#pragma once

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <limits>
#include <mutex>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace musigma {

#if defined(__linux__)

// Blocks of 1 MB and more: below, malloc itself keeps what is freed.
class Cache final : public c10::Allocator {
 public:
  static constexpr size_t kSmallest = size_t{1} << 20;
  static constexpr size_t kHugePage = size_t{2} << 20;
  static constexpr size_t kPage = 4096;

  // Never destroyed: tensors may outlive every static object.
  static Cache& get() {
    static Cache* cache = new Cache;
    return *cache;
  }

  c10::DataPtr allocate(size_t bytes) override {
    const size_t size = rounded(bytes);
    Block* block = take(size);
    if (!block) block = new Block{map(size + kPage), size, next_shift()};
    char* data = block->start + block->shift;
    c10::profiledCPUMemoryReporter().New(data, size);
    return {data, block, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  size_t limit() const { return limit_; }
  size_t kept() const { return kept_; }
  void set_limit(size_t bytes) {
    limit_ = bytes;
    const std::lock_guard<std::mutex> lock(mutex_);
    shrink(bytes);
  }
  void clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    shrink(0);
  }

 private:
  struct Block {
    char* start;
    size_t size, shift;
  };

  // Blocks that all began at a page's start would put x, dy and dx at the same places of a cache, value for value, and
  // push each other out of it. So they begin at 16 places, 4 lines apart, in a page of their own.
  static size_t next_shift() {
    static std::atomic<size_t> count{0};
    return count.fetch_add(1, std::memory_order_relaxed) % 16 * 256;
  }

  // At most an eighth more than was asked for, so that nearly equal shapes share blocks.
  static size_t rounded(size_t bytes) {
    bytes = std::max(bytes, kSmallest);
    size_t step = kSmallest / 8;
    while (step * 16 < bytes) step *= 2;
    if (bytes > 2 * kHugePage) step = std::max(step, kHugePage);
    return (bytes + step - 1) / step * step;
  }

  static char* map(size_t size) {
    const bool huge = size > 2 * kHugePage;
    const size_t spare = huge ? kHugePage : 0;
    char* start = (char*)mmap(nullptr, size + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) {
      c10::profiledCPUMemoryReporter().OutOfMemory(size);
      TORCH_CHECK_WITH(OutOfMemoryError, false, "musigma could not allocate ", size, " bytes for a result");
    }
    if (!huge) return start;
    // A huge page is faulted in at once; it has to start at a multiple of its size.
    const size_t before = (kHugePage - (size_t)start % kHugePage) % kHugePage;
    if (before) munmap(start, before);
    if (before < spare) munmap(start + before + size, spare - before);
    madvise(start + before, size / kHugePage * kHugePage, MADV_HUGEPAGE);
    return start + before;
  }

  static void unmap(Block* block) {
    munmap(block->start, block->size + kPage);
    delete block;
  }

  // The lock is never waited for: a thread that forked may have left it taken.
  Block* take(size_t size) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock) return nullptr;
    for (auto block = idle_.rbegin(); block != idle_.rend(); ++block) {
      if ((*block)->size != size) continue;
      Block* found = *block;
      idle_.erase(std::next(block).base());
      kept_ -= size;
      return found;
    }
    return nullptr;
  }

  static void give_back(void* context) {
    Block* block = static_cast<Block*>(context);
    c10::profiledCPUMemoryReporter().Delete(block->start + block->shift);
    Cache& cache = get();
    const std::unique_lock<std::mutex> lock(cache.mutex_, std::try_to_lock);
    if (!lock || block->size > cache.limit_) return unmap(block);
    cache.shrink(cache.limit_ - block->size);
    cache.idle_.push_back(block);
    cache.kept_ += block->size;
  }

  // Lets go of what has been idle longest.
  void shrink(size_t most) {
    size_t gone = 0;
    while (kept_ > most) {
      kept_ -= idle_[gone]->size;
      unmap(idle_[gone++]);
    }
    idle_.erase(idle_.begin(), idle_.begin() + (std::ptrdiff_t)gone);
  }

  std::mutex mutex_;
  std::vector<Block*> idle_;  // the most recent last: it may still be in a cache
  std::atomic<size_t> kept_{0}, limit_{0};
};

inline bool cached(size_t bytes) {
  // Whoever has installed an allocator of his own for the process gets what he asked for.
  return bytes >= Cache::kSmallest && Cache::get().limit() > 0 &&
         c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator();
}

inline void set_cache_limit(size_t bytes) { Cache::get().set_limit(bytes); }
inline void empty_cache() { Cache::get().clear(); }
inline size_t memory_cached() { return Cache::get().kept(); }

#else

inline void set_cache_limit(size_t) {}
inline void empty_cache() {}
inline size_t memory_cached() { return 0; }

#endif

inline at::Tensor allocated(at::IntArrayRef sizes, at::ScalarType type, at::MemoryFormat format) {
#if defined(__linux__)
  const size_t bytes = (size_t)c10::multiply_integers(sizes) * c10::elementSize(type);
  if (cached(bytes))
    return at::Tensor(
        at::detail::empty_generic(sizes, &Cache::get(), c10::DispatchKeySet(c10::DispatchKey::CPU), type, format));
#endif
  return at::Tensor(at::detail::empty_cpu(sizes, type, false, format));
}

// A CPU tensor that a kernel is about to fill. (Not by at::empty: the dispatcher costs more than a small result.)
inline at::Tensor output(
    at::IntArrayRef sizes, at::ScalarType type, at::MemoryFormat format = at::MemoryFormat::Contiguous) {
  at::Tensor t = allocated(sizes, type, format);
  // As torch does where algorithms must be deterministic: NaN shows a kernel that leaves a gap.
  const auto& context = at::globalContext();
  if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory())
    t.fill_(std::numeric_limits<double>::quiet_NaN());
  return t;
}

}  // namespace musigma
