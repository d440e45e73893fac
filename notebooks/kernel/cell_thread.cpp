#include "notebooks/kernel/cell_thread.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <system_error>

#include "notebooks/kernel/interruption.h"

namespace shardbook::notebook {
namespace {

constexpr int kCrashes[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};

// Data for the handler of a crash, which may only write to a file.
std::atomic<int> crash_signal{0};
std::atomic<int> crash_wake{-1};

void wake(int file) {
  const std::uint64_t one = 1;
  if (write(file, &one, sizeof one) < 0) {
    // If the counter is full, the reader wakes up anyway.
  }
}

/// Tells the main thread, and stops this one: it cannot go on. Where the main
/// thread itself has crashed, the process ends.
void on_crash(int signal) {
  if (gettid() == getpid()) {
    ::signal(signal, SIG_DFL);
    raise(signal);
    return;
  }
  crash_signal = signal;
  wake(crash_wake);
  for (;;) pause();
}

/// Does nothing but end a system call that waits.
void on_nudge(int) {}

/// Handlers run on a stack of their own: the cell's may be exhausted, and
/// oneDNN points the stack pointer at its buffers while it computes.
void install_handlers() {
  struct sigaction action {};
  action.sa_flags = SA_ONSTACK;
  action.sa_handler = on_crash;
  for (const int signal : kCrashes) sigaction(signal, &action, nullptr);
  action.sa_handler = on_nudge;
  sigaction(SIGUSR1, &action, nullptr);
}

void use_own_signal_stack() {
  constexpr std::size_t kBytes = 65536;
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return;
  stack_t stack{};
  stack.ss_sp = memory;
  stack.ss_size = kBytes;
  sigaltstack(&stack, nullptr);
}

void empty(int file, std::size_t bytes) {
  std::array<char, 1024> ignored;
  while (read(file, ignored.data(), bytes) > 0) {
  }
}

}  // namespace

CellThread::CellThread() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  interrupts_ = signalfd(-1, &signals, SFD_NONBLOCK | SFD_CLOEXEC);
  wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (interrupts_ < 0 || wake_ < 0) {
    throw std::system_error(errno, std::generic_category(),
                            "the kernel cannot watch its cells");
  }
  crash_wake = wake_;
  install_handlers();
  thread_ = std::thread([this] { serve(); });
}

CellThread::~CellThread() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (crash_.empty()) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void CellThread::serve() {
  use_own_signal_stack();
  guard_.allow_this_thread();
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || state_ == State::kRunning; });
    if (stopping_) return;
    lock.unlock();
    work_();
    flush_output();
    lock.lock();
    state_ = State::kDone;
    wake(wake_);
  }
}

bool CellThread::has_ended() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return state_ == State::kDone;
}

bool CellThread::run(const std::function<void()>& work,
                     const OutputPipes::Receiver& receive) {
  if (!crash_.empty()) return false;
  const auto print = [&](const char* name, const std::string& text) {
    pace_.count();
    receive(name, text);
  };
  // An interrupt that came while no cell ran is not meant for this one.
  empty(interrupts_, sizeof(signalfd_siginfo));
  set_interrupted(false);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_ = work;
    state_ = State::kRunning;
  }
  changed_.notify_all();

  std::optional<Clock::time_point> patient_until;
  while (!has_ended() && crash_signal == 0) {
    pollfd files[] = {{wake_, POLLIN, 0},
                      {interrupts_, POLLIN, 0},
                      {pipes_.out(), POLLIN, 0},
                      {pipes_.err(), POLLIN, 0}};
    // While the cell has sent too much, its output stays in the pipes
    const int wait_ms = pace_.wait_ms();
    if (wait_ms > 0) {
      poll(files, 2, wait_ms);
    } else {
      poll(files, 4, 100);
    }
    empty(wake_, sizeof(std::uint64_t));
    if (pace_.wait_ms() == 0) {
      pipes_.drain(print, /*last=*/false);
      answer_show(print);
    }
    watch_interrupts(patient_until, print);
  }
  pipes_.drain(print, /*last=*/true);

  if (crash_signal != 0) {
    crash_ = strsignal(crash_signal);
    return false;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  state_ = State::kIdle;
  return true;
}

void CellThread::drop_output() {
  pipes_.drain([](const char*, const std::string&) {}, /*last=*/true);
}

void CellThread::show(const std::function<void()>& send) {
  constexpr std::string_view kWhat = "a display";
  if (!guard_.allows(kWhat.data(), kWhat.size())) return;
  flush_output();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock,
                [&] { return shown_ == nullptr || state_ != State::kRunning; });
  if (state_ != State::kRunning) return;
  shown_ = &send;
  wake(wake_);
  changed_.wait(lock, [&] { return shown_ != &send; });
}

/// What was printed before a display appears before it.
void CellThread::answer_show(const OutputPipes::Receiver& print) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (shown_ == nullptr) return;
  const std::function<void()>& send = *shown_;
  lock.unlock();
  pipes_.drain(print, /*last=*/true);
  pace_.count();
  send();
  lock.lock();
  shown_ = nullptr;
  changed_.notify_all();
}

/// Sets the flag, and wakes the cell from a system call, again and again: the
/// cell may have been about to begin one.
void CellThread::watch_interrupts(
    std::optional<Clock::time_point>& patient_until,
    const OutputPipes::Receiver& print) {
  signalfd_siginfo signal{};
  if (read(interrupts_, &signal, sizeof signal) > 0 && !is_interrupted()) {
    set_interrupted(true);
    patient_until = Clock::now() + std::chrono::seconds(5);
  }
  if (!is_interrupted()) return;
  pthread_kill(thread_.native_handle(), SIGUSR1);
  if (patient_until && Clock::now() >= *patient_until) {
    patient_until.reset();
    print("stderr",
          "The cell is in compiled code, which cannot be interrupted. "
          "Wait until it returns, or restart the kernel.\n");
  }
}

}  // namespace shardbook::notebook
