#include "notebooks/live_ranks.h"

#include <exception>

#include "chapters/programs/programs.h"
#include "comm/launch.h"
#include "core/check.h"

namespace shardbook::notebook {

void run_on_ranks(int world_size,
                  const std::function<void(ProcessGroup& world)>& body) {
  SB_CHECK(world_size >= 1, "on_ranks: world_size is ", world_size,
           "; it has to be at least 1");
  run_ranks(world_size, [&body](ProcessGroup& world) {
    try {
      body(world);
    } catch (const std::exception& error) {
      // run_ranks throws the first cause, whose message does not name its rank.
      throw Error("rank " + std::to_string(world.rank()) + ": " + error.what());
    }
  });
}

// A reference into the library of every chapter. A linker leaves out libraries
// that nothing refers to, and cells refer to them only later.
const std::vector<NamedProgram>& every_chapter();

const std::vector<NamedProgram>& every_chapter() { return programs(); }

}  // namespace shardbook::notebook
