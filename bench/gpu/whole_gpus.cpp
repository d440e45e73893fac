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
#include <string>
#include <string_view>
#include <vector>

#include "core/gpus.h"

namespace shardbook {
namespace {

struct Library {
  std::string name;
  std::vector<std::string> files;  ///< the newest first
  std::string what_it_adds;
  /// A function that returns its version or, with 0, writes it.
  const char* version;
  bool is_returned = false;
  /// NVIDIA's version numbers put major, minor and patch side by side. The
  /// driver's have no patch: 13010 is "13.1" with 1000 for a major version.
  int major_unit = 10000;
};

/// The version of a loaded file.
std::string version_of(const Library& library, void* file) {
  void* const get = dlsym(file, library.version);
  std::int64_t version = 0;
  if (get != nullptr && library.is_returned) {
    version =
        static_cast<std::int64_t>(reinterpret_cast<std::size_t (*)()>(get)());
  } else {
    int written = 0;
    if (get == nullptr || reinterpret_cast<int (*)(int*)>(get)(&written) != 0) {
      return "of unknown version";
    }
    version = written;
  }
  const int unit = library.major_unit, minor_unit = unit / 100;
  std::string text =
      fmt::format("{}.{}", version / unit, version % unit / minor_unit);
  if (unit > 1000) text += fmt::format(".{}", version % minor_unit);
  return text;
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

const std::vector<Library> kLibraries = {
    {"cuBLASLt",
     {"libcublasLt.so.13", "libcublasLt.so.12"},
     "matrix products on GPUs",
     "cublasLtGetVersion",
     /*is_returned=*/true},
    {"cuDNN",
     {"libcudnn.so.9"},
     "convolutions on GPUs",
     "cudnnGetVersion",
     /*is_returned=*/true},
    {"NCCL",
     {"libnccl.so.2"},
     "ranks with a GPU each: --backend nccl",
     "ncclGetVersion"}};
const Library kDriver = {"NVIDIA's driver",     {"libcuda.so.1"},
                         "GPUs: --device cuda", "cuDriverGetVersion",
                         /*is_returned=*/false,
                         /*major_unit=*/1000};

void print_library(const Library& library, const std::string& before = "") {
  for (const std::string& name : library.files) {
    void* file = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (file == nullptr) continue;
    fmt::print("  has    {:<22} {}{}\n", library.name, before,
               version_of(library, file));
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
  const std::string release = driver_release();
  print_library(kDriver,
                release + (release.empty() ? "" : ", ") + "up to CUDA ");
  for (const Library& library : kLibraries) print_library(library);
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
