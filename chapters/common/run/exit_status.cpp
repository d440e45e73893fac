#include "chapters/common/run/exit_status.h"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <system_error>

#include "comm/processes.h"
#include "comm/signals.h"
#include "core/own_program.h"
#include "core/text_file.h"

namespace shardbook {
namespace {

std::atomic<bool> has_begun{false};

}  // namespace

bool interrupted() { return received_signal() != 0; }

void begin_run() { has_begun = true; }

namespace {

// The exit status for an error.
int status_of(const std::exception& error) {
  if (dynamic_cast<const OptionsDiffer*>(&error) != nullptr ||
      dynamic_cast<const BadCheckpoint*>(&error) != nullptr) {
    return kExitBadInput;
  }
  // The system's answer, such as a full disk, is no mistake in the options.
  if (dynamic_cast<const RunError*>(&error) != nullptr ||
      dynamic_cast<const WriteError*>(&error) != nullptr ||
      dynamic_cast<const std::system_error*>(&error) != nullptr) {
    return kExitRunFailed;
  }
  return has_begun ? kExitRunFailed : kExitBadInput;
}

}  // namespace

int chapter_main(const std::function<int()>& body) {
  shorten_waits();
  watch_signals();
  // A write beyond the limit on sizes of files fails, as on a full disk.
  std::signal(SIGXFSZ, SIG_IGN);
  try {
    const int status = body();
    // A program that reports to a full disk must not end well.
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      throw RunError(std::string("standard output cannot be written: ") +
                     std::strerror(errno));
    }
    return status;
  } catch (const Interrupted& stop) {
    if (is_first_process()) std::fprintf(stderr, "%s\n", stop.what());
    return 128 + received_signal();
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr,
                 "error: out of memory: the system has no more; give smaller "
                 "sizes, or --backend sim, which has shapes alone\n");
    return kExitRunFailed;
  } catch (const std::exception& error) {
    // An error after a signal comes from another rank that has stopped.
    if (interrupted()) return 128 + received_signal();
    const int status = status_of(error);
    // Copies of this program have the same options: one of them reports the
    // error
    const bool is_copy = std::getenv("SHARDBOOK_RANK") != nullptr;
    if (status != kExitBadInput || !is_copy || is_first_process()) {
      std::fprintf(stderr, "error: %s\n", error.what());
    }
    return status;
  }
}

}  // namespace shardbook
