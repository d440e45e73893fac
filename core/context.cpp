#include "core/context.h"

#include <algorithm>
#include <array>
#include <memory>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/internal/cuda_device.h"
#include "core/kernels/kernel_context.h"

#ifdef SHARDBOOK_HAVE_OPENMP
#include <omp.h>
#endif

namespace shardbook {
namespace {

// The only thread-local of the book, with the owner of the context that a
// thread gets when it installs none.
thread_local RankContext* current_context = nullptr;

struct DefaultContext {
  RankContext context;
  ~DefaultContext() {
    if (current_context == &context) current_context = nullptr;
  }
};

int runtime_threads() {
#ifdef SHARDBOOK_HAVE_OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

void set_runtime_threads(int threads) {
#ifdef SHARDBOOK_HAVE_OPENMP
  omp_set_num_threads(threads);
#else
  (void)threads;
#endif
}

}  // namespace

// Scratch memory of kernels, counted on the device where it lies: the GPU, or,
// for kernels on the host, the rank's emulated device or its host memory.
class DeviceScratch : public ScratchProvider {
 public:
  DeviceScratch(RankContext& context, Device cuda)
      : context_(context), cuda_(std::move(cuda)) {}
  void* acquire(std::size_t bytes) override {
    const Device& device = cuda_.defined()             ? cuda_
                           : context_.device.is_cuda() ? context_.host()
                                                       : context_.device;
    auto storage = std::make_unique<Storage>(
        device, static_cast<std::int64_t>(bytes), MemoryKind::kWorkspace);
    void* data = storage->data();
    // Null on a meta device, whose rank may still compute on another device.
    SB_CHECK(data != nullptr, "scratch: ", device.name(),
             " has no memory for kernels");
    lent_.emplace(data, std::move(storage));
    return data;
  }
  void release(void* pointer) override { lent_.erase(pointer); }

 private:
  RankContext& context_;
  const Device cuda_;
  std::unordered_map<void*, std::unique_ptr<Storage>> lent_;
};

struct RankContext::Kernels {
  Kernels(RankContext& owner, const Device& cuda)
      : device(cuda),
        scratch(owner, cuda),
        context(&scratch,
                cuda.defined() ? DeviceType::kCuda : DeviceType::kCpu) {}
  ~Kernels() {
    if (!device.defined()) return;
    // Kernels may still run and use the context's state.
    try {
      internal::cuda_device(device).synchronize();
    } catch (const Error&) {
      // The device failed; every wait for a result has thrown the error.
    }
  }

  const Device device;  ///< undefined: the host
  DeviceScratch scratch;
  KernelContext context;
};

const char* phase_name(Phase phase) {
  constexpr std::array kNames = {"forward", "backward", "optimizer"};
  return kNames[static_cast<std::size_t>(phase)];
}

RankContext::RankContext(Device device, int rank, int num_threads)
    : device(std::move(device)), num_threads(num_threads) {
  this->rank = rank;
}

RankContext::~RankContext() = default;

RankContext* RankContext::installed() { return current_context; }

RankContext* RankContext::exchange(RankContext* context) {
  return std::exchange(current_context, context);
}

RankContext& RankContext::current() {
  if (current_context == nullptr) {
    thread_local DefaultContext fallback;
    current_context = &fallback.context;
  }
  return *current_context;
}

RankContext::Scope::Scope(RankContext& context)
    : previous_(current_context), previous_threads_(runtime_threads()) {
  current_context = &context;
  if (context.num_threads > 0) set_runtime_threads(context.num_threads);
}

RankContext::Scope::~Scope() {
  current_context = previous_;
  set_runtime_threads(previous_threads_);
}

RankContext& RankContext::worker(const Device& worker_device) {
  auto found = std::find_if(
      workers_.begin(), workers_.end(),
      [&](const auto& entry) { return entry.first == worker_device; });
  if (found == workers_.end()) {
    workers_.emplace_back(worker_device,
                          std::make_unique<RankContext>(worker_device));
    found = std::prev(workers_.end());
  }
  RankContext& context = *found->second;
  static_cast<RankSettings&>(context) = *this;
  context.num_threads = num_threads;
  context.stream = stream;
  context.weight_gradients = weight_gradients;
  context.graph_task = graph_task;
  return context;
}

void RankSettings::add_observer(std::shared_ptr<Observer> observer) {
  observers_.push_back(std::move(observer));
}

void RankSettings::remove_observer(const std::shared_ptr<Observer>& observer) {
  observers_.erase(std::remove(observers_.begin(), observers_.end(), observer),
                   observers_.end());
}

void RankContext::notify_op_begin(const OpEvent& event) {
  for (const auto& observer : observers_) observer->on_op_begin(event);
}

void RankContext::notify_op_end(const OpEvent& event) {
  for (const auto& observer : observers_) observer->on_op_end(event);
}

void RankContext::notify_allocation(const AllocationEvent& event) {
  for (const auto& observer : observers_) observer->on_allocation(event);
}

const Device& RankContext::host() {
  if (!host_.defined()) {
    const Device gpu = internal::gpu_of(device);
    host_ = gpu.defined()      ? internal::make_pinned_host(gpu)
            : device.is_meta() ? Device::meta(-1)
                               : Device::cpu(-1);
  }
  return host_;
}

RankContext::Kernels& RankContext::kernels_of(const Device& on) {
  const Device cuda = on.is_cuda() ? on : Device();
  for (const auto& each : kernels_) {
    if (each->device == cuda) return *each;
  }
  kernels_.push_back(std::make_unique<Kernels>(*this, cuda));
  return *kernels_.back();
}

KernelContext& RankContext::kernels(const Device& on) {
  KernelContext& context = kernels_of(on).context;
  context.deterministic = deterministic;
  context.allow_tf32 = allow_tf32;
  if (on.is_cuda()) context.stream = internal::cuda_device(on).stream(stream);
  return context;
}

int num_threads() { return runtime_threads(); }

}  // namespace shardbook
