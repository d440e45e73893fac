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

cudaError_t gone(const char* function, const char* what) {
  return report(cudaErrorInvalidResourceHandle,
                std::string(function) + ": there is no such " + what);
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
  ++runtime.num_calls[function];
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
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
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
  properties->major = 8;
  properties->minor = 0;
  properties->multiProcessorCount = 4;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error == cudaSuccess) *value = properties.major;
  return error;
}

cudaError_t cudaDeviceSynchronize() {
  EMULATOR_ENTER_UNSAFE();
  runtime.advance_device(emulator::current_device(), lock);
  return emulator::report_failure(runtime, emulator::current_device());
}
