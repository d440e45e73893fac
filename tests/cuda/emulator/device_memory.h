#pragma once

// Memory of the emulated devices, and pinned memory of the host.
//
//   | no access | 0xff ... | what was asked for | < 16 bytes 0xff | no access |
//
// What runs past the end meets a page that nobody may touch; what writes just
// before the start, or into the gap, changes bytes that are looked at later.
// New memory is filled with 0xff, a NaN in every floating dtype. Between
// kernels device memory is closed to the host altogether.

#include <cstddef>
#include <optional>
#include <string>

namespace emulator {

constexpr int kHost = -1;

struct Allocation {
  char* begin = nullptr;
  std::size_t bytes = 0;
  int device = kHost;
  char* pages = nullptr;  ///< with the page below and the page above
  std::size_t page_bytes = 0;
  bool is_free = false;  ///< kept for a while, so that its users are found
};

// All but the last are called by one thread at a time.

/// Memory of a device, or pinned memory (kHost); null when there is none.
void* allocate(int device, std::size_t bytes);
/// Returns what is wrong, or nothing.
std::string release(void* pointer, int device);
/// The allocation that holds the address; null for other memory.
const Allocation* find_allocation(const void* address);
std::size_t allocated_bytes(int device);

/// "4 bytes past the end of the 400 bytes at 0x7f..."
std::string describe_address(const void* address);
/// An allocation around which something was written; empty where all is well.
std::string find_breach();

/// Device memory can be touched while one of these lives.
class OpenDeviceMemory {
 public:
  OpenDeviceMemory();
  ~OpenDeviceMemory();
  OpenDeviceMemory(const OpenDeviceMemory&) = delete;
  OpenDeviceMemory& operator=(const OpenDeviceMemory&) = delete;
};

/// Opens device memory when it is needed first: to open and to close takes a
/// call of the system for each allocation.
class MemoryOnDemand {
 public:
  void open() {
    if (!opened_) opened_.emplace();
  }
  void close() { opened_.reset(); }

 private:
  std::optional<OpenDeviceMemory> opened_;
};

/// Accesses of kernels to memory that is not there become failures of theirs.
void install_fault_handler();

}  // namespace emulator
