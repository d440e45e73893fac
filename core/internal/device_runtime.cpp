#include "core/internal/device_runtime.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>

#include "core/check.h"

namespace shardbook::internal {
namespace {

struct Loaded {
  DeviceRuntime* runtime = nullptr;
  std::string why_not;
};

// The library is in the folder of the library that contains this code.
std::filesystem::path library_path() {
  if (const char* chosen = std::getenv("SHARDBOOK_CUDA_LIBRARY")) {
    if (*chosen != '\0') return chosen;
  }
  Dl_info info{};
  const std::string name = "libshardbook_cuda.so";
  if (dladdr(reinterpret_cast<const void*>(&cuda_runtime), &info) == 0) {
    return name;
  }
  std::error_code ignored;
  const auto core = std::filesystem::canonical(info.dli_fname, ignored);
  return core.parent_path() / name;
}

std::string last_dl_error() {
  const char* words = dlerror();
  return words == nullptr ? "no reason given" : words;
}

Loaded load() {
  const std::filesystem::path path = library_path();
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    if (std::getenv("SHARDBOOK_CUDA_LIBRARY") != nullptr) {
      return {nullptr, "cuda: SHARDBOOK_CUDA_LIBRARY names " + path.string() +
                           ", which does not exist"};
    }
    return {nullptr,
            "cuda: this build has no CUDA kernels (no nvcc was found when it "
            "was configured, or Ninja has not built gpu_libraries)"};
  }
  // Never unloaded: kernels/kernel.h keeps the addresses of its kernels.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return {nullptr, "cuda: " + last_dl_error()};
  void* symbol = dlsym(library, "shardbook_cuda_runtime");
  if (symbol == nullptr) return {nullptr, "cuda: " + last_dl_error()};
  Loaded loaded;
  try {
    DeviceRuntime* runtime = reinterpret_cast<DeviceRuntime* (*)()>(symbol)();
    if (runtime->count() > 0) {
      loaded.runtime = runtime;
    } else {
      loaded.why_not = "cuda: no GPU is visible";
    }
  } catch (const Error& error) {
    loaded.why_not =
        std::string("cuda: no GPU is visible (") + error.what() + ")";
  }
  return loaded;
}

const Loaded& loaded() {
  static const Loaded once = load();
  return once;
}

}  // namespace

DeviceRuntime& cuda_runtime() {
  SB_CHECK(loaded().runtime != nullptr, loaded().why_not);
  return *loaded().runtime;
}

std::string why_no_cuda() { return loaded().why_not; }

}  // namespace shardbook::internal
