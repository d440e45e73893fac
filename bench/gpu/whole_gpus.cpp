// The GPUs of this machine and their software, for `./shardbook doctor`.
//
//   gpus          GPUs, driver and NVIDIA's libraries, and which worlds run
//   gpus --why    prints why no GPU can be used, with exit status 1; or nothing
//
// The libraries are asked for their versions one by one, so a library that is
// missing is named even where Shardbook's own cannot be loaded without it.

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstddef>
#include <cstdio>
#include <exception>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/gpus.h"

namespace shardbook {
namespace {

/// 13010 as "13.1": NVIDIA's version numbers put major, minor and patch side by
/// side.
std::string dotted(std::int64_t version, int major_unit, int minor_unit,
                   bool has_patch) {
  const std::int64_t minor = version % major_unit / minor_unit;
  std::string text = fmt::format("{}.{}", version / major_unit, minor);
  if (has_patch) text += fmt::format(".{}", version % minor_unit);
  return text;
}

struct Library {
  std::string name;
  std::vector<std::string> files;  ///< the newest first
  std::string what_it_adds;
  /// The version, from the loaded file.
  std::function<std::string(void* file)> version;
};

/// The function of a loaded file, of type F.
template <typename F>
F* function(void* file, const char* name) {
  return reinterpret_cast<F*>(dlsym(file, name));
}

/// A library with a function that writes its version and returns 0.
std::function<std::string(void*)> written_by(const char* name, int major_unit,
                                             int minor_unit, bool has_patch) {
  return [=](void* file) -> std::string {
    int version = 0;
    const auto get = function<int(int*)>(file, name);
    if (get == nullptr || get(&version) != 0) return "of unknown version";
    return dotted(version, major_unit, minor_unit, has_patch);
  };
}

/// A library with a function that returns its version.
std::function<std::string(void*)> returned_by(const char* name, int major_unit,
                                              int minor_unit) {
  return [=](void* file) -> std::string {
    const auto get = function<std::size_t()>(file, name);
    if (get == nullptr) return "of unknown version";
    return dotted(static_cast<std::int64_t>(get()), major_unit, minor_unit,
                  true);
  };
}

/// "580.159.03", from the line of the kernel's module; empty without one.
std::string driver_release() {
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

std::vector<Library> libraries() {
  return {{"NVIDIA's driver",
           {"libcuda.so.1"},
           "GPUs: --device cuda",
           [](void* file) {
             const std::string cuda =
                 "up to CUDA " +
                 written_by("cuDriverGetVersion", 1000, 10, false)(file);
             const std::string release = driver_release();
             return release.empty() ? cuda : release + ", " + cuda;
           }},
          {"cuBLASLt",
           {"libcublasLt.so.13", "libcublasLt.so.12"},
           "matrix products on GPUs",
           returned_by("cublasLtGetVersion", 10000, 100)},
          {"cuDNN",
           {"libcudnn.so.9"},
           "convolutions on GPUs",
           returned_by("cudnnGetVersion", 10000, 100)},
          {"NCCL",
           {"libnccl.so.2"},
           "ranks with a GPU each: --backend nccl",
           written_by("ncclGetVersion", 10000, 100, true)}};
}

void print_library(const Library& library) {
  for (const std::string& name : library.files) {
    void* file = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (file == nullptr) continue;
    fmt::print("  has    {:<22} {}\n", library.name, library.version(file));
    return;
  }
  fmt::print("  lacks  {:<22} optional; it adds: {}\n", library.name,
             library.what_it_adds);
}

void print_gpus(const std::string& why_not) {
  if (!why_not.empty()) {
    fmt::print("gpus      none: {}\n", why_not);
    return;
  }
  for (int i = 0; i < num_gpus(); ++i) {
    const Gpu found = gpu(i);
    fmt::print(
        "{:<10}cuda:{}: {}, {:.0f} GiB memory, {} multiprocessors, "
        "compute capability {}.{}\n",
        i == 0 ? "gpus" : "", i, found.name,
        static_cast<double>(found.memory_bytes) / (1 << 30),
        found.multiprocessors, found.major, found.minor);
  }
}

int report() {
  const std::string why_not = why_no_gpu();
  print_gpus(why_not);
  for (const Library& library : libraries()) print_library(library);
  std::string worlds = "threads, sim";
  if (SHARDBOOK_HAVE_GLOO) worlds += ", gloo";
  fmt::print("worlds    on the CPU: {}", worlds);
  if (why_not.empty()) {
    const int count = num_gpus();
    fmt::print(
        "; with --device cuda: threads (ranks share {}), nccl (up to {} "
        "rank{} here)",
        count == 1 ? "the GPU" : "the GPUs", count, count == 1 ? "" : "s");
    fmt::print("\nlibrary   {}", gpu_versions());
  }
  fmt::print("\n");
  return 0;
}

}  // namespace
}  // namespace shardbook

int main(int argc, char** argv) {
  try {
    if (argc == 2 && std::string_view(argv[1]) == "--why") {
      const std::string reason = shardbook::why_no_gpu();
      if (!reason.empty()) std::puts(reason.c_str());
      return reason.empty() ? 0 : 1;
    }
    return shardbook::report();
  } catch (const std::exception& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return 2;
  }
}
