#include "core/device_graph.h"

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/context.h"
#include "core/internal/cuda_device.h"
#include "core/kernels/kernel_context.h"

namespace shardbook {
namespace {

using internal::CudaDevice;
using internal::GraphBlocks;

/// Knows which operation an error belongs to.
class Operations : public Observer {
 public:
  void on_op_begin(const OpEvent& event) override {
    running_.push_back(event.name);
  }
  // An operation that throws has ended when the error is caught.
  void on_op_end(const OpEvent&) override {
    last_ = running_.back();
    if (std::uncaught_exceptions() > 0 && failed_ == nullptr) failed_ = last_;
    running_.pop_back();
  }
  void on_host_read(const Device& device) override {
    if (device.is_cuda()) failed_ = "item";
  }

  /// "gelu: " for an error in the operation, "after gelu: " for a later one.
  std::string place() const {
    if (failed_ != nullptr) return std::string(failed_) + ": ";
    return last_ == nullptr ? "" : std::string("after ") + last_ + ": ";
  }

 private:
  std::vector<const char*> running_;
  const char* last_ = nullptr;
  const char* failed_ = nullptr;
};

/// Watches the current context for the lifetime of the scope.
class OperationsScope {
 public:
  OperationsScope() { context_.add_observer(operations_); }
  ~OperationsScope() { context_.remove_observer(operations_); }
  OperationsScope(const OperationsScope&) = delete;
  OperationsScope& operator=(const OperationsScope&) = delete;
  std::string place() const { return operations_->place(); }

 private:
  RankContext& context_ = RankContext::current();
  const std::shared_ptr<Operations> operations_ =
      std::make_shared<Operations>();
};

}  // namespace

struct DeviceGraph::State {
  State(const Device& on, std::shared_ptr<GraphBlocks> its_blocks)
      : device(on),
        gpu(internal::cuda_device(on)),
        blocks(std::move(its_blocks)) {}
  // Launches may still run.
  ~State() {
    try {
      gpu.synchronize(blocks->stream());
      if (executable != nullptr) gpu.runtime().destroy_graph(executable);
    } catch (const Error&) {
      // The device failed; every wait for it has thrown the error.
    }
  }

  const Device device;  // lives as long as the graph
  CudaDevice& gpu;
  const std::shared_ptr<GraphBlocks> blocks;
  /// Keeps alive the address at which kernels of the graph report errors.
  std::shared_ptr<void> kernels_state;
  void* executable = nullptr;
};

DeviceGraph::DeviceGraph(const std::function<void()>& work,
                         const DeviceGraph* shares_memory_with) {
  RankContext& context = RankContext::current();
  SB_CHECK(context.device.is_cuda(), "device graph: ", context.device.name(),
           " is no GPU");
  internal::cuda_device(context.device)
      .refuse_recording("another graph of this device");
  SB_CHECK(!context.observed(),
           "device graph: operations are observed, and nobody would see those "
           "of a launch; remove the observers");
  std::shared_ptr<GraphBlocks> blocks;
  if (shares_memory_with != nullptr) {
    blocks = shares_memory_with->state_->blocks;
    SB_CHECK(blocks->device() == context.device &&
                 blocks->stream() == context.stream,
             "device graph: graphs that share memory are of one device and "
             "one stream");
  } else {
    blocks = std::make_shared<GraphBlocks>(context.device, context.stream);
  }
  const auto state = std::make_shared<State>(context.device, blocks);
  const OperationsScope operations;
  state->gpu.begin_recording(*blocks);
  try {
    work();
    state->executable = state->gpu.end_recording();
  } catch (const Error& error) {
    state->gpu.drop_recording();
    throw Error("device graph: " + operations.place() + error.what());
  } catch (...) {
    state->gpu.drop_recording();
    throw;
  }
  state->kernels_state = context.kernels(context.device).cuda_state;
  state_ = state;
}

void DeviceGraph::launch() const {
  const RankContext& context = RankContext::current();
  const int stream = state_->blocks->stream();
  SB_CHECK(context.device == state_->device && context.stream == stream,
           "device graph: recorded on ", state_->device.name(), ", stream ",
           stream, "; launched on ", context.device.name(), ", stream ",
           context.stream);
  void* const on = state_->gpu.stream(stream);
  state_->gpu.runtime().launch_graph(state_->executable, on);
}

}  // namespace shardbook
