// Error codes, and devices.

#include <algorithm>
#include <cstring>

#include "tests/cuda/emulator/capture.h"
#include "tests/cuda/emulator/device_memory.h"
#include "tests/cuda/emulator/streams.h"

namespace emulator {
namespace {

thread_local int device_of_thread = 0;
// The last error that this thread was given, with more than its code says.
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaError_t told_error = cudaSuccess;
thread_local std::string told_text;

}  // namespace

int current_device() { return device_of_thread; }

cudaError_t report(cudaError_t error, const std::string& text) {
  last_error = told_error = error;
  told_text = text;
  return error;
}

cudaError_t report_failure(Runtime& runtime, int device) {
  const auto failure = runtime.failures.find(device);
  if (failure == runtime.failures.end()) return cudaSuccess;
  const std::string text = failure->second;
  runtime.failures.erase(failure);
  // On a GPU every later call would fail as well. Here the next test goes on.
  report(cudaErrorLaunchFailure, text);
  last_error = cudaSuccess;
  return cudaErrorLaunchFailure;
}

cudaError_t planted(Runtime& runtime, const char* function) {
  const auto found = runtime.planted.find(function);
  if (found == runtime.planted.end() || --found->second.first > 0) {
    return cudaSuccess;
  }
  const cudaError_t error = found->second.second;
  runtime.planted.erase(found);
  return report(error);
}

}  // namespace emulator

using emulator::report;
using emulator::Runtime;

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define EMULATOR_NAME(name) \
  case name:                \
    return #name;
    EMULATOR_NAME(cudaSuccess)
    EMULATOR_NAME(cudaErrorInvalidValue)
    EMULATOR_NAME(cudaErrorMemoryAllocation)
    EMULATOR_NAME(cudaErrorInvalidConfiguration)
    EMULATOR_NAME(cudaErrorInsufficientDriver)
    EMULATOR_NAME(cudaErrorNoDevice)
    EMULATOR_NAME(cudaErrorInvalidDevice)
    EMULATOR_NAME(cudaErrorInvalidResourceHandle)
    EMULATOR_NAME(cudaErrorNotReady)
    EMULATOR_NAME(cudaErrorIllegalAddress)
    EMULATOR_NAME(cudaErrorPeerAccessAlreadyEnabled)
    EMULATOR_NAME(cudaErrorLaunchFailure)
    EMULATOR_NAME(cudaErrorIllegalState)
    EMULATOR_NAME(cudaErrorStreamCaptureUnsupported)
    EMULATOR_NAME(cudaErrorStreamCaptureInvalidated)
    EMULATOR_NAME(cudaErrorStreamCaptureMerge)
    EMULATOR_NAME(cudaErrorStreamCaptureUnmatched)
    EMULATOR_NAME(cudaErrorStreamCaptureUnjoined)
    EMULATOR_NAME(cudaErrorStreamCaptureIsolation)
    EMULATOR_NAME(cudaErrorCapturedEvent)
    EMULATOR_NAME(cudaErrorStreamCaptureWrongThread)
    EMULATOR_NAME(cudaErrorUnknown)
#undef EMULATOR_NAME
  }
  return "cudaErrorUnknown";
}

const char* cudaGetErrorString(cudaError_t error) {
  if (error == emulator::told_error && !emulator::told_text.empty()) {
    return emulator::told_text.c_str();
  }
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    case cudaErrorIllegalState:
      return "the operation cannot be performed in the present state";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorCapturedEvent:
      return "operation not permitted on an event last recorded in a "
             "capturing stream";
    default:
      return "unknown error";
  }
}

cudaError_t cudaGetLastError() {
  return std::exchange(emulator::last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() { return emulator::last_error; }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  EMULATOR_ENTER();
  *count = runtime.num_devices;
  return *count == 0 ? report(cudaErrorNoDevice) : cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  EMULATOR_ENTER();
  if (device < 0 || device >= runtime.num_devices) {
    return report(cudaErrorInvalidDevice);
  }
  emulator::device_of_thread = device;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = emulator::device_of_thread;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  EMULATOR_ENTER();
  if (device < 0 || device >= runtime.num_devices) {
    return report(cudaErrorInvalidDevice);
  }
  *properties = {};
  std::strcpy(properties->name, "emulated GPU");
  properties->totalGlobalMem = runtime.device_bytes;
  properties->sharedMemPerBlock = 48 << 10;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->major = 8;
  properties->minor = 0;
  properties->multiProcessorCount = 4;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what,
                                   int device) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) return error;
  switch (what) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = properties.maxThreadsPerBlock;
      break;
    case cudaDevAttrWarpSize:
      *value = properties.warpSize;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = properties.multiProcessorCount;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = properties.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = properties.minor;
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  EMULATOR_ENTER_UNSAFE();
  runtime.advance_device(emulator::current_device(), lock);
  return emulator::report_failure(runtime, emulator::current_device());
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
