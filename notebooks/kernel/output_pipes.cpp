#include "notebooks/kernel/output_pipes.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <iostream>
#include <stdexcept>

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

}  // namespace shardbook::notebook
