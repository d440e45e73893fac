#include "notebooks/kernel/print_guard.h"

#include <algorithm>
#include <iostream>
#include <stdexcept>
#include <streambuf>

namespace shardbook::notebook {

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
