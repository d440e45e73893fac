// Finds and loads what calls NCCL.

#include "comm/nccl/nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <vector>

#include "core/check.h"

namespace shardbook::internal {
namespace {

constexpr const char* kName = "libshardbook_nccl.so";

// The folder of the library that this code is in.
std::string own_folder() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&why_no_nccl), &info) == 0) {
    return "";
  }
  std::error_code ignored;
  return std::filesystem::absolute(info.dli_fname, ignored)
      .parent_path()
      .string();
}

struct Loaded {
  NcclLibrary* library = nullptr;
  std::string problem;
};

Loaded load() {
  std::vector<std::string> places;
  const char* given = std::getenv("SHARDBOOK_NCCL_LIBRARY");
  if (given != nullptr) {
    places.emplace_back(given);
  } else {
    const std::string folder = own_folder();
    if (!folder.empty()) places.push_back(folder + "/" + kName);
    places.emplace_back(kName);
  }
  Loaded result;
  bool exists = given != nullptr;
  for (const std::string& place : places) {
    void* handle = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* reason = dlerror();
      std::error_code ignored;
      // A file that is there and cannot be loaded is the reason to report.
      const bool is_there = std::filesystem::exists(place, ignored);
      if (is_there || (!exists && result.problem.empty())) {
        result.problem = reason == nullptr ? place : reason;
      }
      exists = exists || is_there;
      if (given != nullptr && reason != nullptr) result.problem = reason;
      continue;
    }
    using Entry = NcclLibrary*();
    auto* entry = reinterpret_cast<Entry*>(dlsym(handle, "shardbook_nccl"));
    if (entry == nullptr) {
      result.problem = place + " has no shardbook_nccl";
      continue;
    }
    result.library = entry();
    return result;
  }
  result.problem =
      exists ? "backend nccl: " + result.problem
             : std::string(
                   "backend nccl: this build has no NCCL; install the CUDA "
                   "Toolkit and NCCL (nccl.h, libnccl.so) and build again, or "
                   "use --backend threads");
  return result;
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
