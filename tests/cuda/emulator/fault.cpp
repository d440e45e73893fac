// Accesses to memory that is closed, or that nobody may touch.
//
// While work runs on the device, the first access to an allocation opens it.
// A kernel that runs past an array meets a page without access, and the
// processor tells this process by SIGSEGV. The handler cannot throw and should
// not jump. It changes the place where the thread goes on when the handler
// returns: not the instruction that failed, but land(), which ends the kernel.

#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstring>

#include "tests/cuda/emulator/block.h"
#include "tests/cuda/emulator/device_memory.h"

namespace emulator {
namespace {

struct sigaction previous;
const void* fault_address = nullptr;
bool fault_is_write = false;

std::string describe_fault() {
  return (fault_is_write ? "outside: it writes " : "outside: it reads ") +
         describe_address(fault_address);
}

[[noreturn]] void land() { fail_without_unwinding(&describe_fault); }

bool go_on_at_land(ucontext_t& context) {
#if defined(__x86_64__)
  fault_is_write = (context.uc_mcontext.gregs[REG_ERR] & 2) != 0;
  // Below what the interrupted function may use under its stack pointer, and
  // aligned as after a call.
  auto& stack = context.uc_mcontext.gregs[REG_RSP];
  stack = ((stack - 256) & ~15ll) - 8;
  context.uc_mcontext.gregs[REG_RIP] = reinterpret_cast<greg_t>(&land);
  return true;
#elif defined(__aarch64__)
  context.uc_mcontext.sp &= ~15ull;
  context.uc_mcontext.pc = reinterpret_cast<std::uint64_t>(&land);
  return true;
#else
  return false;
#endif
}

void handle(int signal, siginfo_t* info, void* context) {
  if (open_at(info->si_addr)) return;
  fault_address = info->si_addr;
  if (is_running() && go_on_at_land(*static_cast<ucontext_t*>(context))) return;
  const std::string where = describe_address(fault_address);
  if (where.find("no allocation") == std::string::npos) {
    const std::string text =
        "emulator: the host touches device memory, " + where + "\n";
    [[maybe_unused]] const auto written =
        write(STDERR_FILENO, text.data(), text.size());
  }
  // The instruction fails once more, and whoever was here before hears of it.
  sigaction(signal, &previous, nullptr);
}

}  // namespace

void install_fault_handler() {
  static const bool once = [] {
    struct sigaction action = {};
    action.sa_sigaction = &handle;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    sigaction(SIGSEGV, &action, &previous);
    return true;
  }();
  (void)once;
}

}  // namespace emulator
