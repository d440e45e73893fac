#include "notebooks/kernel/cell_thread.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <stdexcept>
#include <streambuf>
#include <system_error>
#include <utility>

#include "notebooks/kernel/interruption.h"

namespace shardbook::notebook {
namespace {

constexpr std::array<const char*, 2> kNames = {"stdout", "stderr"};

/// The number of bytes at the end of `text` that begin an unfinished character.
std::size_t begun_character(const std::string& text) {
  for (std::size_t back = 1; back <= 3 && back <= text.size(); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if (byte < 0x80) return 0;
    if (byte < 0xC0) continue;
    const std::size_t size = byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
    return back < size ? back : 0;
  }
  return 0;
}

/// Writes what the buffers of std::cout, std::cerr and stdio hold.
void flush_output() {
  std::cout.flush();
  std::cerr.flush();
  std::clog.flush();
  std::fflush(nullptr);
}

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

// ---- What cells print

OutputPipes::OutputPipes() {
  for (int i = 0; i < 2; ++i) {
    std::array<int, 2> pair{};
    if (pipe2(pair.data(), O_CLOEXEC) != 0 || dup2(pair[1], i + 1) < 0) {
      throw std::runtime_error("the kernel cannot redirect its output");
    }
    close(pair[1]);
    fcntl(pair[0], F_SETFL, O_NONBLOCK);
    ends_[i] = pair[0];
  }
  // Pipes are fully buffered by default; a reader wants to see lines.
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
}

OutputPipes::~OutputPipes() {
  for (const int end : ends_) close(end);
}

void OutputPipes::drain(const Receiver& receive, bool last) {
  std::array<char, 65536> buffer;
  for (int i = 0; i < 2; ++i) {
    std::string text = std::exchange(begun_[i], "");
    const std::size_t had = text.size();
    // One pipe's capacity at a time: a cell that prints all the time must not
    // keep the reader here.
    const ssize_t n = read(ends_[i], buffer.data(), buffer.size());
    if (n > 0) text.append(buffer.data(), static_cast<std::size_t>(n));
    if (!last || text.size() > had) {
      begun_[i] = text.substr(text.size() - begun_character(text));
      text.resize(text.size() - begun_[i].size());
    }
    if (!text.empty()) receive(kNames[i], text);
    if (last && n > 0) --i;  // there may be more
  }
}

/// Passes on what allowed threads print. It has no buffer of its own: each
/// insertion arrives here in the thread that makes it.
class GuardedBuffer : public std::streambuf {
 public:
  GuardedBuffer(PrintGuard& guard, std::ostream& stream)
      : guard_(guard), stream_(stream), inner_(stream.rdbuf(this)) {}
  ~GuardedBuffer() override { stream_.rdbuf(inner_); }

 protected:
  int_type overflow(int_type character) override {
    if (traits_type::eq_int_type(character, traits_type::eof())) return 0;
    const char text = traits_type::to_char_type(character);
    return guard_.allows({&text, 1}) ? inner_->sputc(text) : character;
  }
  std::streamsize xsputn(const char* text, std::streamsize size) override {
    return guard_.allows({text, static_cast<std::size_t>(size)})
               ? inner_->sputn(text, size)
               : size;
  }
  int sync() override { return inner_->pubsync(); }

 private:
  PrintGuard& guard_;
  std::ostream& stream_;
  std::streambuf* inner_;
};

PrintGuard::PrintGuard() : own_stdout_(stdout) {
  allow_this_thread();
  std::size_t i = 0;
  for (std::ostream* stream : {&std::cout, &std::cerr, &std::clog}) {
    buffers_[i++] = std::make_unique<GuardedBuffer>(*this, *stream);
  }
  // printf writes where std::cout does, so their order stays
  cookie_io_functions_t functions{};
  functions.write = [](void* guard, const char* text, std::size_t size) {
    return static_cast<PrintGuard*>(guard)->buffers_[0]->sputn(
        text, static_cast<std::streamsize>(size));
  };
  guarded_stdout_ = fopencookie(this, "w", functions);
  if (guarded_stdout_ == nullptr) {
    throw std::runtime_error("the kernel cannot guard its output");
  }
  std::setvbuf(guarded_stdout_, nullptr, _IONBF, 0);
  stdout = guarded_stdout_;
}

PrintGuard::~PrintGuard() {
  stdout = own_stdout_;
  std::fclose(guarded_stdout_);
}

void PrintGuard::allow_this_thread() {
  const std::lock_guard<std::mutex> lock(mutex_);
  allowed_.push_back(std::this_thread::get_id());
}

bool PrintGuard::allows(std::string_view text) {
  const std::thread::id thread = std::this_thread::get_id();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(allowed_.begin(), allowed_.end(), thread) != allowed_.end()) {
    return true;
  }
  if (refused_thread_ == std::thread::id()) refused_thread_ = thread;
  if (refused_thread_ == thread) refused_.append(text);
  constexpr std::size_t kEnough = 60;
  refused_.resize(std::min(refused_.size(), kEnough));
  return false;
}

std::string PrintGuard::refused() {
  const std::lock_guard<std::mutex> lock(mutex_);
  refused_thread_ = std::thread::id();
  const std::string text = std::exchange(refused_, "");
  return text.substr(0, text.find('\n'));
}

// ---- The thread of cells

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
  if (!guard_.allows("a display")) return;
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
