#pragma once

// A GPU for tests of core: its memory is the host's, and work on a stream runs
// only when somebody waits for it. A missing wait in core thus shows in values.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/internal/device_runtime.h"
#include "core/kernels/elementwise.h"
#include "core/kernels/kernel_context.h"

namespace shardbook {

struct LateStream {
  std::deque<std::function<void()>> work;

  void run_one() {
    const std::function<void()> next = std::move(work.front());
    work.pop_front();
    next();
  }
  void run() {
    while (!work.empty()) run_one();
  }
};

struct LateEvent {
  LateStream* stream = nullptr;
  std::int64_t recorded = 0;  ///< times that record was called
  std::int64_t passed = 0;    ///< times that the stream reached it

  /// The stream runs until it reaches the n-th record.
  void run_until(std::int64_t n) {
    while (passed < n) stream->run_one();
  }
};

class LateRuntime : public internal::DeviceRuntime {
 public:
  int num_devices = 1;
  std::int64_t memory_bytes = std::int64_t{1} << 30;
  std::int64_t used_bytes = 0;
  int num_records = 0;  ///< calls of record_event
  int num_holds = 0;    ///< calls of hold_stream

  int count() const override { return num_devices; }
  Gpu properties(int) const override { return {}; }
  std::string versions() const override { return "late"; }
  void use(int) override {}

  void* allocate(std::size_t bytes) override {
    const auto size = static_cast<std::int64_t>(bytes);
    if (used_bytes + size > memory_bytes) return nullptr;
    used_bytes += size;
    void* data = std::aligned_alloc(64, bytes);
    sizes_[data] = size;
    return data;
  }
  void free(void* pointer) override {
    for (LateStream* stream : streams_) {
      SB_CHECK(stream->work.empty(), "freed while a stream has work");
    }
    used_bytes -= sizes_.at(pointer);
    sizes_.erase(pointer);
    std::free(pointer);
  }
  void* allocate_pinned(std::size_t bytes) override {
    return std::aligned_alloc(64, bytes);
  }
  void free_pinned(void* pointer) override { std::free(pointer); }

  void* make_stream() override {
    return *streams_.insert(new LateStream()).first;
  }
  void destroy_stream(void* stream) override {
    streams_.erase(of(stream));
    delete of(stream);
  }
  void synchronize_stream(void* stream) override { of(stream)->run(); }

  void* make_event() override {
    return events_.emplace_back(std::make_unique<LateEvent>()).get();
  }
  // CUDA keeps an event until its record has run.
  void destroy_event(void*) override {}
  void record_event(void* pointer, void* stream) override {
    auto* event = static_cast<LateEvent*>(pointer);
    // CUDA allows this for an event without further waits.
    event->stream = of(stream);
    event->recorded += 1;
    num_records += 1;
    of(stream)->work.emplace_back(
        [event, n = event->recorded] { event->passed = n; });
  }
  void hold_stream(void* stream, void* pointer) override {
    auto* event = static_cast<LateEvent*>(pointer);
    num_holds += 1;
    of(stream)->work.emplace_back(
        [event, from = event->stream, n = event->recorded] {
          while (event->passed < n) from->run_one();
        });
  }
  void synchronize_event(void* pointer) override {
    auto* event = static_cast<LateEvent*>(pointer);
    event->run_until(event->recorded);
  }
  bool event_has_passed(void* pointer) override {
    const auto* event = static_cast<LateEvent*>(pointer);
    return event->passed == event->recorded;
  }
  double seconds_between(void*, void*) override { return 0.25; }

  void begin_capture(void*) override { SB_FAIL("late: no graphs"); }
  void* end_capture(void*) override { SB_FAIL("late: no graphs"); }
  void drop_capture(void*) noexcept override {}
  void launch_graph(void*, void*) override { SB_FAIL("late: no graphs"); }
  void destroy_graph(void*) override { SB_FAIL("late: no graphs"); }

  void copy(void* to, const void* from, std::size_t bytes,
            void* stream) override {
    of(stream)->work.emplace_back(
        [to, from, bytes] { std::memcpy(to, from, bytes); });
  }
  void fill_zero(void* to, std::size_t bytes, void* stream) override {
    of(stream)->work.emplace_back([to, bytes] { std::memset(to, 0, bytes); });
  }
  void check_kernels(KernelContext&) override {}

 private:
  static LateStream* of(void* stream) {
    return static_cast<LateStream*>(stream);
  }
  std::map<void*, std::int64_t> sizes_;
  std::set<LateStream*> streams_;
  std::vector<std::unique_ptr<LateEvent>> events_;
};

/// The kernels of these tests, in the order of their stream.
namespace late_kernels {

inline KernelContext& host() {
  static KernelContext context;
  return context;
}

inline void fill(KernelContext& context, DType dtype, std::int64_t n, void* x,
                 double value) {
  static_cast<LateStream*>(context.stream)->work.emplace_back([=] {
    kernels::cpu::fill(host(), dtype, n, x, value);
  });
}

inline void cast(KernelContext& context, DType from_dtype, const void* from,
                 DType to_dtype, void* to, std::int64_t n) {
  static_cast<LateStream*>(context.stream)->work.emplace_back([=] {
    kernels::cpu::cast(host(), from_dtype, from, to_dtype, to, n);
  });
}

inline void install() {
  kernels::fill.set_cuda(&fill);
  kernels::cast.set_cuda(&cast);
}

}  // namespace late_kernels

}  // namespace shardbook
