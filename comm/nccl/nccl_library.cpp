// Finds and loads the library that calls NCCL.

#include "comm/nccl/nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "core/check.h"

namespace shardbook::internal {
namespace {

struct Loaded {
  NcclLibrary* library = nullptr;
  std::string problem;
};

// The library is in the folder of the one that contains this code.
std::string library_path() {
  if (const char* given = std::getenv("SHARDBOOK_NCCL_LIBRARY")) return given;
  Dl_info info{};
  const std::string name = "libshardbook_nccl.so";
  if (dladdr(reinterpret_cast<const void*>(&why_no_nccl), &info) == 0) {
    return name;
  }
  std::error_code ignored;
  const auto own = std::filesystem::absolute(info.dli_fname, ignored);
  return (own.parent_path() / name).string();
}

Loaded load() {
  const std::string path = library_path();
  std::error_code ignored;
  if (std::getenv("SHARDBOOK_NCCL_LIBRARY") == nullptr &&
      !std::filesystem::exists(path, ignored)) {
    return {nullptr,
            "backend nccl: this build has no NCCL; install the CUDA Toolkit "
            "and NCCL (nccl.h, libnccl.so) and build again, or use --backend "
            "threads"};
  }
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    return {nullptr, "backend nccl: " +
                         (reason == nullptr ? path : std::string(reason))};
  }
  using Entry = NcclLibrary*();
  auto* entry = reinterpret_cast<Entry*>(dlsym(handle, "shardbook_nccl"));
  if (entry == nullptr) {
    return {nullptr, "backend nccl: " + path + " has no shardbook_nccl"};
  }
  return {entry(), ""};
}

const Loaded& loaded() {
  static const Loaded result = load();
  return result;
}

}  // namespace

std::string why_no_nccl() { return loaded().problem; }

NcclLibrary& nccl_library() {
  SB_CHECK(loaded().library != nullptr, loaded().problem);
  return *loaded().library;
}

}  // namespace shardbook::internal
