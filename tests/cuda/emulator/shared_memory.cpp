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

// Keeps the last reader, and another one of the same moment.
void remember(Moment (&readers)[2]) {
  if (readers[0].barrier != now.barrier) {
    readers[1] = {};
  } else if (readers[0].thread != now.thread) {
    readers[1] = readers[0];
  }
  readers[0] = now;
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
  const bool reads = access == Access::kRead;
  const auto check = [&](const Moment& before, const char* others) {
    if (before.barrier < block_begin || is_ordered(before)) return;
    fail(std::string("race: it ") + (reads ? "reads " : "writes ") +
         name(array, index) + ", which " + thread_name(before.thread) + " " +
         others + " with no barrier in between");
  };
  check(history.written, "wrote");
  if (reads && history.written.barrier < block_begin) {
    fail("not written: it reads " + name(array, index) +
         ", to which no thread of the block has written");
  }
  if (reads) {
    remember(history.read);
  } else {
    check(history.read[0], "read");
    check(history.read[1], "read");
    history.written = now;
  }
  return array.values + static_cast<std::size_t>(index) * array.element_bytes;
}

}  // namespace emulator
