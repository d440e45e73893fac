#include "tests/cuda/emulator/device_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <sstream>
#include <vector>

#include "tests/cuda/emulator/emulator.h"

namespace emulator {
namespace {

constexpr unsigned char kPattern = 0xff;
constexpr std::size_t kAlignment = 16;
// How much around an allocation is looked at after every kernel.
constexpr std::size_t kNear = 64;
// Freed allocations whose addresses are not given out again yet.
constexpr std::size_t kKeptAfterFree = 64;

struct Memory {
  std::map<const char*, Allocation> by_begin;  // freed ones, too
  std::deque<const char*> freed;
  std::map<int, std::size_t> allocated;
  std::atomic<int> open = 0;
  std::vector<Allocation*> opened;
  std::atomic_flag is_opening;  // kernels of the CPU have several threads
};
// Never destroyed: a fault may come while the process ends.
Memory& memory() {
  static Memory& instance = *new Memory;
  return instance;
}

std::size_t page_size() {
  static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

void protect(const Allocation& a, bool open) {
  mprotect(a.pages + page_size(), a.page_bytes - 2 * page_size(),
           open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

// The first byte around `a`, up to `limit` away, that is not as it was.
const char* changed_byte(const Allocation& a, std::size_t limit) {
  const auto is_changed = [](const char* byte) {
    return static_cast<unsigned char>(*byte) != kPattern;
  };
  const char* const first = a.pages + page_size();
  for (const char* byte = a.begin;
       byte-- > first &&
       a.begin - byte <= static_cast<std::ptrdiff_t>(limit);) {
    if (is_changed(byte)) return byte;
  }
  const char* const last = a.pages + a.page_bytes - page_size();
  for (const char* byte = a.begin + a.bytes; byte < last; ++byte) {
    if (is_changed(byte)) return byte;
  }
  return nullptr;
}

std::string describe_breach(const char* byte) {
  return "something was written " + describe_address(byte);
}

}  // namespace

void* allocate(int device, std::size_t bytes) {
  const std::size_t page = page_size();
  const std::size_t rounded =
      (bytes + kAlignment - 1) / kAlignment * kAlignment;
  Allocation a;
  a.bytes = bytes;
  a.device = device;
  a.page_bytes = (rounded + page - 1) / page * page + 2 * page;
  void* pages = mmap(nullptr, a.page_bytes, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) return nullptr;
  a.pages = static_cast<char*>(pages);
  a.begin = a.pages + a.page_bytes - page - rounded;
  protect(a, true);
  std::memset(a.pages + page, kPattern, a.page_bytes - 2 * page);
  if (device != kHost) protect(a, false);
  memory().by_begin[a.begin] = a;
  memory().allocated[device] += bytes;
  return a.begin;
}

std::string release(void* pointer, int device) {
  Memory& m = memory();
  const auto found = m.by_begin.find(static_cast<char*>(pointer));
  std::ostringstream problem;
  if (found == m.by_begin.end()) {
    problem << pointer << " was not allocated: it lies "
            << describe_address(pointer);
    return problem.str();
  }
  Allocation& a = found->second;
  if (a.is_free) {
    problem << pointer << " was freed before";
    return problem.str();
  }
  if ((a.device == kHost) != (device == kHost)) {
    problem << pointer << " is "
            << (a.device == kHost ? "memory of the host"
                                  : "memory of a device");
    return problem.str();
  }
  std::string breach;
  {
    const OpenDeviceMemory opened;
    const char* const byte = changed_byte(a, a.page_bytes);
    if (byte != nullptr) breach = describe_breach(byte);
  }
  std::erase(m.opened, &a);
  m.allocated[a.device] -= a.bytes;
  a.is_free = true;
  a.is_open = false;
  madvise(a.pages, a.page_bytes, MADV_DONTNEED);
  mprotect(a.pages, a.page_bytes, PROT_NONE);
  m.freed.push_back(a.begin);
  if (m.freed.size() > kKeptAfterFree) {
    const auto oldest = m.by_begin.find(m.freed.front());
    munmap(oldest->second.pages, oldest->second.page_bytes);
    m.by_begin.erase(oldest);
    m.freed.pop_front();
  }
  return breach;
}

const Allocation* find_allocation(const void* address) {
  const Memory& m = memory();
  auto after = m.by_begin.upper_bound(static_cast<const char*>(address));
  if (after == m.by_begin.begin()) return nullptr;
  const Allocation& a = std::prev(after)->second;
  const bool is_inside = !a.is_free && address < a.begin + a.bytes;
  return is_inside ? &a : nullptr;
}

std::size_t allocated_bytes(int device) { return memory().allocated[device]; }

std::string describe_address(const void* address) {
  const char* const byte = static_cast<const char*>(address);
  std::ostringstream text;
  for (const auto& [begin, a] : memory().by_begin) {
    if (byte < a.pages || byte >= a.pages + a.page_bytes) continue;
    if (byte < a.begin) {
      text << a.begin - byte << " bytes before the start of the ";
    } else if (byte >= a.begin + a.bytes) {
      text << byte - (a.begin + a.bytes) << " bytes past the end of the ";
    } else {
      text << byte - a.begin << " bytes into the ";
    }
    text << a.bytes << " bytes at " << static_cast<const void*>(a.begin);
    if (a.is_free) text << ", which were freed";
    return text.str();
  }
  text << "at " << address << ", where no allocation is near";
  return text.str();
}

std::string find_breach() {
  for (const auto& [begin, a] : memory().by_begin) {
    if (a.is_free || (a.device != kHost && !a.is_open)) continue;
    const char* const byte = changed_byte(a, kNear);
    if (byte == nullptr) continue;
    const std::string text = describe_breach(byte);
    // Reported once.
    char* const first = a.pages + page_size();
    std::memset(first, kPattern, static_cast<std::size_t>(a.begin - first));
    char* const end = a.begin + a.bytes;
    std::memset(
        end, kPattern,
        static_cast<std::size_t>(a.pages + a.page_bytes - page_size() - end));
    return text;
  }
  return "";
}

OpenDeviceMemory::OpenDeviceMemory() {
  Memory& m = memory();
  // A fault must not allocate.
  if (m.open++ == 0) m.opened.reserve(m.by_begin.size());
}

OpenDeviceMemory::~OpenDeviceMemory() {
  Memory& m = memory();
  if (--m.open > 0) return;
  for (Allocation* a : m.opened) {
    a->is_open = false;
    protect(*a, false);
  }
  m.opened.clear();
}

bool open_at(const void* address) {
  Memory& m = memory();
  if (m.open == 0) return false;
  const char* const byte = static_cast<const char*>(address);
  while (m.is_opening.test_and_set(std::memory_order_acquire)) {
  }
  // Inside of an allocation, or in the bytes around it that share its pages.
  const auto after = m.by_begin.upper_bound(byte);
  const auto before = after == m.by_begin.begin() ? after : std::prev(after);
  bool is_open = false;
  for (const auto& place : {before, after}) {
    if (place == m.by_begin.end()) continue;
    Allocation& a = place->second;
    if (a.is_free || a.device == kHost || byte < a.pages + page_size() ||
        byte >= a.pages + a.page_bytes - page_size()) {
      continue;
    }
    if (!a.is_open) {
      protect(a, true);
      a.is_open = true;
      m.opened.push_back(&a);
    }
    is_open = true;
  }
  m.is_opening.clear(std::memory_order_release);
  return is_open;
}

}  // namespace emulator
