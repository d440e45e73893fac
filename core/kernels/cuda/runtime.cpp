// The DeviceRuntime of core/internal/device_runtime.h over the CUDA runtime,
// and the state of a rank's kernels between calls.

#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "core/check.h"
#include "core/internal/device_runtime.h"
#include "core/kernels/cuda/device_state.h"
#include "core/kernels/cuda/status_check.h"

namespace shardbook::kernels::cuda {

// --- State of the kernels ----------------------------------------------------

namespace {

constexpr std::size_t kResultBytes = 64;

void throw_found(DeviceError& error) {
  const DeviceError found = error;
  if (found.code == DeviceError::kNone) return;
  error = DeviceError();
  switch (found.code) {
    case DeviceError::kIndexOutside:
      SB_FAIL("gather_rows: index ", found.value, "; the table has rows ",
              found.first, " to ", found.last - 1);
    case DeviceError::kTargetOutside:
      SB_FAIL("cross_entropy: target ", found.value, "; classes are ",
              found.first, " to ", found.last - 1);
    case DeviceError::kDivisionByZero:
      SB_FAIL("div: an integer divisor is zero");
    default:
      SB_FAIL("CUDA: a kernel reports the unknown error ", found.code);
  }
}

}  // namespace

CudaState::CudaState() {
  void* pinned = nullptr;
  SHARDBOOK_CUDA(cudaHostAlloc(&pinned, sizeof(DeviceError) + kResultBytes,
                               cudaHostAllocMapped | cudaHostAllocPortable));
  error = new (pinned) DeviceError();
  result = static_cast<char*>(pinned) + sizeof(DeviceError);
}

void refuse_capture(const KernelContext& context, const char* why) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  SHARDBOOK_CUDA(cudaStreamIsCapturing(stream_of(context.stream), &status));
  SB_CHECK(status == cudaStreamCaptureStatusNone,
           "a graph cannot record this: ", why);
}

// A failed device has reported its error before; ignore further ones.
CudaState::~CudaState() { (void)cudaFreeHost(error); }

CudaState& cuda_state(KernelContext& context) {
  if (context.cuda_state == nullptr) {
    refuse_capture(context,
                   "the first kernel of a rank on this device allocates memory "
                   "of the host; run the work once before");
    context.cuda_state = std::make_shared<CudaState>();
  }
  return *static_cast<CudaState*>(context.cuda_state.get());
}

void read_result(KernelContext& context, void* to, const void* from,
                 std::size_t bytes) {
  SB_CHECK(bytes <= kResultBytes, "CUDA: a result of ", bytes, " bytes; ",
           kResultBytes, " fit");
  CudaState& state = cuda_state(context);
  refuse_capture(context, "the host waits for a result");
  const auto stream = stream_of(context.stream);
  SHARDBOOK_CUDA(
      cudaMemcpyAsync(state.result, from, bytes, cudaMemcpyDefault, stream),
      bytes, " bytes");
  SHARDBOOK_CUDA(cudaStreamSynchronize(stream));
  throw_found(*state.error);
  std::memcpy(to, state.result, bytes);
}

std::vector<VersionText>& library_versions() {
  static std::vector<VersionText> all;
  return all;
}

// --- The runtime -------------------------------------------------------------

namespace {

// "580.159.03", from the kernel module's text; empty where it has none.
std::string driver_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string word;
  while (file >> word) {
    if (word.find('.') != std::string::npos &&
        word.find_first_not_of("0123456789.") == std::string::npos) {
      return word;
    }
  }
  return "";
}

// 13000 is 13.0.
std::string dotted(int version) {
  return std::to_string(version / 1000) + "." +
         std::to_string(version % 1000 / 10);
}

/// In its scope this thread may allocate during a capture. The memory is not
/// part of the graph, which is right for memory that its owner keeps.
class MayAllocate {
 public:
  MayAllocate() { exchange(); }
  ~MayAllocate() { exchange(); }
  MayAllocate(const MayAllocate&) = delete;
  MayAllocate& operator=(const MayAllocate&) = delete;

 private:
  // It fails for unknown modes only.
  void exchange() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// False where there is no memory left; throws any other error of `call`.
bool has_memory(cudaError_t error, const char* call, std::size_t bytes) {
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();  // forgets it
    return false;
  }
  SHARDBOOK_CUDA(error, call, " of ", bytes, " bytes");
  return true;
}

class CudaRuntime : public internal::DeviceRuntime {
 public:
  int count() const override {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess) return count;
    (void)cudaGetLastError();  // forgets it
    int driver = 0;
    const bool has_driver =
        cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0;
    SB_FAIL("the driver says: ", cudaGetErrorString(error),
            has_driver ? "; the driver is for CUDA " + dotted(driver)
                       : "; no driver is installed");
  }

  Gpu properties(int index) const override {
    cudaDeviceProp found{};
    SHARDBOOK_CUDA(cudaGetDeviceProperties(&found, index), "device ", index);
    return {found.name, static_cast<std::int64_t>(found.totalGlobalMem),
            found.multiProcessorCount, found.major, found.minor};
  }

  std::string versions() const override {
    int runtime = 0, driver = 0;
    SHARDBOOK_CUDA(cudaRuntimeGetVersion(&runtime));
    SHARDBOOK_CUDA(cudaDriverGetVersion(&driver));
    const std::string module = driver_version();
    std::string text = "CUDA " + dotted(runtime) + ", driver " +
                       (module.empty() ? "" : module + " ") + "for CUDA " +
                       dotted(driver);
    for (const VersionText each : library_versions()) text += ", " + each();
    return text;
  }

  void use(int index) override {
    // CUDA's own setting per thread; reading that costs as much as setting it.
    thread_local int current = -1;
    if (current == index) return;
    SHARDBOOK_CUDA(cudaSetDevice(index), "device ", index);
    current = index;
  }

  void* allocate(std::size_t bytes) override {
    const MayAllocate also_in_captures;
    void* data = nullptr;
    const cudaError_t error = cudaMalloc(&data, bytes);
    return has_memory(error, "cudaMalloc", bytes) ? data : nullptr;
  }
  void free(void* pointer) override { SHARDBOOK_CUDA(cudaFree(pointer)); }

  void* allocate_pinned(std::size_t bytes) override {
    void* data = nullptr;
    const cudaError_t error =
        cudaHostAlloc(&data, bytes, cudaHostAllocPortable);
    return has_memory(error, "cudaHostAlloc", bytes) ? data : nullptr;
  }
  void free_pinned(void* pointer) override {
    SHARDBOOK_CUDA(cudaFreeHost(pointer));
  }

  void* make_stream() override {
    cudaStream_t stream = nullptr;
    SHARDBOOK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
  }
  void destroy_stream(void* stream) override {
    SHARDBOOK_CUDA(cudaStreamDestroy(stream_of(stream)));
  }
  void synchronize_stream(void* stream) override {
    SHARDBOOK_CUDA(cudaStreamSynchronize(stream_of(stream)));
  }

  void* make_event() override {
    cudaEvent_t event = nullptr;
    SHARDBOOK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDefault));
    return event;
  }
  void destroy_event(void* event) override {
    SHARDBOOK_CUDA(cudaEventDestroy(event_of(event)));
  }
  void record_event(void* event, void* stream) override {
    SHARDBOOK_CUDA(cudaEventRecord(event_of(event), stream_of(stream)));
  }
  void hold_stream(void* stream, void* event) override {
    SHARDBOOK_CUDA(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0));
  }
  void synchronize_event(void* event) override {
    SHARDBOOK_CUDA(cudaEventSynchronize(event_of(event)));
  }
  bool event_has_passed(void* event) override {
    const cudaError_t error = cudaEventQuery(event_of(event));
    if (error != cudaErrorNotReady) {
      SHARDBOOK_CUDA(error, "cudaEventQuery");
      return true;
    }
    (void)cudaGetLastError();
    return false;
  }
  double seconds_between(void* earlier, void* later) override {
    float milliseconds = 0;
    SHARDBOOK_CUDA(cudaEventElapsedTime(&milliseconds, event_of(earlier),
                                        event_of(later)));
    return static_cast<double>(milliseconds) * 1e-3;
  }

  void begin_capture(void* stream) override {
    SHARDBOOK_CUDA(cudaStreamBeginCapture(stream_of(stream),
                                          cudaStreamCaptureModeThreadLocal));
  }
  void* end_capture(void* stream) override {
    cudaGraph_t graph = nullptr;
    SHARDBOOK_CUDA(cudaStreamEndCapture(stream_of(stream), &graph));
    cudaGraphExec_t executable = nullptr;
    const cudaError_t error =
        cudaGraphInstantiateWithFlags(&executable, graph, 0);
    const cudaError_t destroyed = cudaGraphDestroy(graph);
    SHARDBOOK_CUDA(error, "cudaGraphInstantiateWithFlags");
    SHARDBOOK_CUDA(destroyed, "cudaGraphDestroy");
    return executable;
  }
  // Called after an error, which says more than a second one would.
  void drop_capture(void* stream) noexcept override {
    cudaGraph_t graph = nullptr;
    (void)cudaStreamEndCapture(stream_of(stream), &graph);
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();  // forgets it
  }
  void launch_graph(void* graph, void* stream) override {
    SHARDBOOK_CUDA(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph),
                                   stream_of(stream)));
  }
  void destroy_graph(void* graph) override {
    SHARDBOOK_CUDA(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)));
  }

  void copy(void* to, const void* from, std::size_t bytes,
            void* stream) override {
    if (bytes == 0) return;
    SHARDBOOK_CUDA(
        cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)),
        bytes, " bytes");
  }
  void fill_zero(void* to, std::size_t bytes, void* stream) override {
    if (bytes == 0) return;
    SHARDBOOK_CUDA(cudaMemsetAsync(to, 0, bytes, stream_of(stream)), bytes,
                   " bytes");
  }

  void check_kernels(KernelContext& context) override {
    if (context.cuda_state != nullptr) throw_found(*cuda_state(context).error);
  }
};

}  // namespace

}  // namespace shardbook::kernels::cuda

extern "C" shardbook::internal::DeviceRuntime* shardbook_cuda_runtime() {
  // Streams that share a queue of the GPU wait for each other; ranks whose
  // messages share one could wait forever. CUDA reads this at its first call.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  static shardbook::kernels::cuda::CudaRuntime runtime;
  return &runtime;
}
