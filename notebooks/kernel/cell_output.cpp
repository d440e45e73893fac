#include "notebooks/kernel/cell_output.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <iostream>
#include <stdexcept>
#include <streambuf>

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

}  // namespace

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
    std::string text = std::move(begun_[i]);
    begun_[i].clear();
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

void flush_output() {
  std::cout.flush();
  std::cerr.flush();
  std::clog.flush();
  std::fflush(nullptr);
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
    return guard_.allows(&text, 1) ? inner_->sputc(text) : character;
  }
  std::streamsize xsputn(const char* text, std::streamsize size) override {
    return guard_.allows(text, static_cast<std::size_t>(size))
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
  cookie_io_functions_t functions{};
  functions.write = &PrintGuard::write_stdout;
  guarded_stdout_ = fopencookie(this, "w", functions);
  if (guarded_stdout_ == nullptr) {
    throw std::runtime_error("the kernel cannot guard its output");
  }
  std::setvbuf(guarded_stdout_, nullptr, _IONBF, 0);
  stdout = guarded_stdout_;
  std::size_t i = 0;
  for (std::ostream* stream : {&std::cout, &std::cerr, &std::clog}) {
    buffers_[i++] = std::make_unique<GuardedBuffer>(*this, *stream);
  }
}

PrintGuard::~PrintGuard() {
  stdout = own_stdout_;
  std::fclose(guarded_stdout_);
}

void PrintGuard::allow_this_thread() {
  const std::lock_guard<std::mutex> lock(mutex_);
  allowed_.push_back(std::this_thread::get_id());
}

bool PrintGuard::allows(const char* text, std::size_t size) {
  const std::thread::id thread = std::this_thread::get_id();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(allowed_.begin(), allowed_.end(), thread) != allowed_.end()) {
    return true;
  }
  if (refused_thread_ == std::thread::id()) refused_thread_ = thread;
  if (refused_thread_ == thread) refused_.append(text, size);
  constexpr std::size_t kEnough = 60;
  refused_.resize(std::min(refused_.size(), kEnough));
  return false;
}

std::string PrintGuard::refused() {
  const std::lock_guard<std::mutex> lock(mutex_);
  refused_thread_ = std::thread::id();
  const std::string text = std::move(refused_);
  refused_.clear();
  return text.substr(0, text.find('\n'));
}

/// Writes to the file that std::cout writes to, so their order stays.
ssize_t PrintGuard::write_stdout(void* guard, const char* text,
                                 std::size_t size) {
  auto& self = *static_cast<PrintGuard*>(guard);
  if (!self.allows(text, size)) return static_cast<ssize_t>(size);
  return static_cast<ssize_t>(std::fwrite(text, 1, size, self.own_stdout_));
}

}  // namespace shardbook::notebook
