#include "tests/cuda/emulator/shared_memory.h"

#include <vector>

#include "tests/cuda/emulator/shared_array.h"

namespace emulator {
namespace {

// What a block may have without asking for more.
constexpr std::size_t kMaxBytes = 48 << 10;

// Arrays of a block lie one after the other, as on a GPU. Moments go on from
// block to block, so the histories need no cleaning.
struct Arena {
  std::vector<char> values = std::vector<char>(kMaxBytes);
  std::vector<ElementHistory> history;
  std::size_t used_bytes = 0, used_elements = 0;
};
Arena& arena() {
  static Arena instance;
  return instance;
}

void place(SharedStorage& array) {
  Arena& a = arena();
  const std::size_t begin = (a.used_bytes + 15) / 16 * 16;
  const std::size_t bytes =
      static_cast<std::size_t>(array.size) * array.element_bytes;
  if (begin + bytes > kMaxBytes) {
    fail("shared arrays of " + std::to_string(begin + bytes) +
         " bytes with that of " + describe(array.declared) +
         "; a block has 49152");
  }
  if (a.history.empty()) a.history.resize(kMaxBytes);
  array.values = a.values.data() + begin;
  array.history = a.history.data() + a.used_elements;
  array.valid_from = block_begin;
  a.used_bytes = begin + bytes;
  a.used_elements += static_cast<std::size_t>(array.size);
}

std::string name(const SharedStorage& array, std::int64_t index) {
  return "element " + std::to_string(index) + " of the shared array of " +
         describe(array.declared);
}

[[noreturn]] void report_race(const SharedStorage& array, std::int64_t index,
                              const char* mine, const Moment& other,
                              const char* others) {
  fail(std::string("race: it ") + mine + " " + name(array, index) + ", which " +
       thread_name(other.thread) + " " + others +
       " with no barrier in between");
}

// Of two moments, keeps one that the next thread may not be ordered after.
void remember(Moment (&moments)[2]) {
  if (moments[0].barrier != now.barrier) {
    moments[1] = {};
  } else if (moments[0].thread != now.thread) {
    const auto warp = [](const Moment& m) { return m.thread / kWarpSize; };
    const bool other_warp =
        moments[1].barrier == now.barrier && warp(moments[1]) != warp(now);
    if (warp(moments[0]) != warp(now) ||
        (!other_warp && moments[0].warp_step == now.warp_step)) {
      moments[1] = moments[0];
    }
  }
  moments[0] = now;
}

}  // namespace

void begin_shared_memory() { arena().used_bytes = arena().used_elements = 0; }

void* touch(SharedStorage& array, std::int64_t index, Access access) {
  if (array.valid_from != block_begin) place(array);
  if (index < 0 || index >= array.size) {
    fail("index outside: " + name(array, index) + ", which has " +
         std::to_string(array.size));
  }
  ElementHistory& history = array.history[index];
  const auto check = [&](const Moment& before, const char* others) {
    if (before.barrier < block_begin || is_ordered(before)) return;
    report_race(array, index,
                access == Access::kRead    ? "reads"
                : access == Access::kWrite ? "writes"
                                           : "updates",
                before, others);
  };
  check(history.written, "wrote");
  if (access != Access::kAtomic) {
    check(history.updated[0], "updated");
    check(history.updated[1], "updated");
  }
  if (access != Access::kRead) {
    check(history.read[0], "read");
    check(history.read[1], "read");
  }
  if (access != Access::kWrite && history.written.barrier < block_begin) {
    fail("not written: it reads " + name(array, index) +
         ", to which no thread of the block has written");
  }
  switch (access) {
    case Access::kRead:
      remember(history.read);
      break;
    case Access::kWrite:
      history.written = now;
      break;
    case Access::kAtomic:
      remember(history.updated);
      break;
  }
  return array.values + static_cast<std::size_t>(index) * array.element_bytes;
}

}  // namespace emulator
