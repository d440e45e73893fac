// The Jupyter kernel of the book: C++17 in the cells that xeus-cling accepts.
//
//   shardbook_kernel -f CONNECTION_FILE [ARGUMENTS OF CLANG...]
//
// Jupyter starts it by the kernel.json next to it.

#include <cxxabi.h>
#include <unistd.h>

#include <boost/core/demangle.hpp>
#include <chrono>
#include <exception>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <typeinfo>
#include <utility>
#include <vector>

#include "notebooks/kernel/cell_grammar.h"
#include "notebooks/kernel/cell_thread.h"
#include "notebooks/kernel/compiler.h"
#include "notebooks/kernel/interruption.h"
#include "notebooks/kernel/xcpp/xdisplay.hpp"
#include "notebooks/kernel/xeus_compat.h"

namespace shardbook::notebook {
namespace {

/// The type of the exception that is being handled.
std::string current_exception_type() {
  const std::type_info* type = abi::__cxa_current_exception_type();
  return type == nullptr ? "exception" : boost::core::demangle(type->name());
}

/// Runs `work` and returns how it failed, if it did.
std::optional<CellError> failure_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const CellError& error) {
    return error;
  } catch (const Interrupted&) {
    return CellError{"Interrupted", "the cell was interrupted"};
  } catch (const std::exception& error) {
    return CellError{current_exception_type(), error.what()};
  } catch (...) {
    return CellError{current_exception_type(),
                     "an exception that is no std::exception"};
  }
  return {};
}

/// The byte at which character `position` of a text in UTF-8 begins: Jupyter's
/// cursor counts characters.
std::size_t byte_of(std::string_view text, int position) {
  const auto continues = [&](std::size_t at) {
    return at < text.size() &&
           (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80;
  };
  std::size_t at = 0;
  for (; at < text.size() && position > 0; --position) {
    do ++at;
    while (continues(at));
  }
  return at;
}

/// The end of the word that has begun at `at`.
std::size_t end_of_word(std::string_view text, std::size_t at) {
  while (at < text.size() && !last_word(text.substr(at, 1)).empty()) ++at;
  return at;
}

class JupyterKernel;
JupyterKernel* the_kernel = nullptr;

/// Answers Jupyter's requests; xeus speaks the protocol.
class JupyterKernel : public XeusInterpreter {
 public:
  explicit JupyterKernel(std::vector<std::string> clang_arguments) {
    the_kernel = this;
    run_on_cell_thread(
        [&] { compiler_ = std::make_unique<Compiler>(clang_arguments); }, true);
  }

  /// For cells, on any thread: see CellThread::show().
  void show(const std::function<void()>& send) {
    thread_.show([&] {
      if (!silent_) send();
    });
  }

 private:
  void configure_impl() override {}

  nl::json execute(int count, const std::string& code, bool silent) override {
    // xeus prints its version when it starts.
    if (!std::exchange(has_run_, true)) thread_.drop_output();
    try {
      run_on_cell_thread([&] { run_cell(count, code); }, silent);
    } catch (const CellError& error) {
      const std::vector<std::string> trace = {"\x1b[31m" + error.name +
                                              "\x1b[0m: " + error.text};
      publish_execution_error(error.name, error.text, trace);
      // create_error_reply() of xeus 2 swaps the name and the text.
      return {{"status", "error"},
              {"ename", error.name},
              {"evalue", error.text},
              {"traceback", trace}};
    }
    return xeus::create_successful_reply();
  }

  nl::json complete_request_impl(const std::string& code, int cursor) override {
    const std::string before = code.substr(0, byte_of(code, cursor));
    // A character of a word is a byte
    const int begin = cursor - static_cast<int>(last_word(before).size());
    std::vector<std::string> names;
    try_on_cell_thread([&] { names = compiler_->completions(before); });
    return xeus::create_complete_reply(names, begin, cursor);
  }

  nl::json inspect_request_impl(const std::string& code, int cursor,
                                int) override {
    const std::string to_end =
        code.substr(0, end_of_word(code, byte_of(code, cursor)));
    std::string text;
    try_on_cell_thread([&] { text = compiler_->description(to_end); });
    if (text.empty()) return xeus::create_inspect_reply();
    return xeus::create_inspect_reply(true, {{"text/plain", text}});
  }

  nl::json is_complete_request_impl(const std::string& code) override {
    return xeus::create_is_complete_reply(completeness_of(code));
  }

  nl::json kernel_info_request_impl() override {
    return xeus::create_info_reply(
        "5.3", "shardbook", "0.1.0", "C++", "17", "text/x-c++src", ".cpp",
        "cpp", "text/x-c++src", "", "C++17 cells, as in xeus-cling");
  }

  void shutdown_request_impl() override {
    // The globals of cells are destroyed on the thread that made them. Where it
    // has crashed, there is nothing left to destroy.
    try_on_cell_thread([&] { compiler_.reset(); });
  }

  void run_cell(int count, const std::string& code) {
    const std::string name = "cell " + std::to_string(count);
    const CellOutline outline = outline_of(code);
    if (outline.kind == CellKind::kRefused) {
      throw CellError{"GrammarError", name + ", line " +
                                          std::to_string(outline.line) + ": " +
                                          outline.reason};
    }
    if (outline.kind == CellKind::kDirectives) {
      run_directives(code, name);
    } else if (outline.kind != CellKind::kEmpty) {
      compiler_->run(code, name);
    }
  }

  void run_directives(const std::string& code, const std::string& name) {
    const Directives directives = directives_of(code);
    if (!directives.error.empty()) {
      throw CellError{"PragmaError", directives.error};
    }
    for (const Directive& directive : directives.list) {
      const std::string& value = directive.value;
      if (directive.verb == "add_include_path") {
        compiler_->add_include_path(value);
      } else if (directive.verb == "add_library_path") {
        library_folders_.push_back(value);
      } else if (const auto file = find_library(value, library_folders_);
                 !file.empty()) {
        compiler_->load(file);
      } else {
        throw CellError{
            "LoadError",
            "load(\"" + value + "\"): there is no such library" +
                (library_folders_.empty()
                     ? "; add_library_path(\"...\") tells where to look"
                     : " in " + library_folders_.back()) +
                "; ./shardbook notebook builds the book's libraries"};
      }
    }
    if (directives.rest.find('#') != std::string::npos) {
      compiler_->run(directives.rest, name);
    }
  }

  /// Throws CellError, in this thread, as `work` failed in the other.
  void run_on_cell_thread(const std::function<void()>& work, bool silent) {
    silent_ = silent;
    std::optional<CellError> error;
    const bool returned =
        thread_.run([&] { error = failure_of(work); },
                    [&](const char* name, const std::string& text) {
                      if (!silent) publish_stream(name, text);
                    });
    if (!returned) {
      throw CellError{"Crash", "a cell has crashed (" + thread_.crash() +
                                   "), and what it was doing is lost: restart "
                                   "the kernel"};
    }
    const std::string refused = thread_.refused_text();
    if (!refused.empty()) {
      const std::string text =
          "a thread of this cell, such as a rank, printed \"" + refused +
          "\", which is not shown: threads print in any order. Return the text "
          "from the rank, and let the cell print it";
      if (!error) throw CellError{"PrintError", text};
      error->text += "\n" + text;
    }
    if (error) throw CellError(*error);
  }

  /// Without what `work` looks up, the front end shows nothing.
  void try_on_cell_thread(const std::function<void()>& work) {
    try {
      run_on_cell_thread(work, true);
    } catch (const CellError&) {
    }
  }

  std::vector<std::string> library_folders_;
  bool has_run_ = false;
  bool silent_ = false;  ///< what runs now shows nothing
  CellThread thread_;
  std::unique_ptr<Compiler> compiler_;  ///< used on the cell thread alone
};

}  // namespace

// ---- Called by cells: xcpp/xdisplay.hpp

void display_bundle(const nl::json& bundle, const std::string& id,
                    bool update) {
  the_kernel->show([&] {
    nl::json transient = nl::json::object();
    if (!id.empty()) transient["display_id"] = id;
    const auto send = update ? &JupyterKernel::update_display_data
                             : &JupyterKernel::display_data;
    (the_kernel->*send)(bundle, nl::json::object(), transient);
  });
}

void clear_display(bool wait) {
  the_kernel->show([&] { the_kernel->clear_output(wait); });
}

}  // namespace shardbook::notebook

namespace {

/// Ends a kernel whose Jupyter was killed. The thread never ends and touches
/// nothing that is destroyed.
void end_with_parent() {
  std::thread([parent = getppid()] {
    while (getppid() == parent) {
      std::this_thread::sleep_for(std::chrono::seconds(1));
    }
    _exit(1);
  }).detach();
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() < 2 || words[0] != "-f") {
    std::cerr << "shardbook_kernel: expected -f CONNECTION_FILE, and then the "
                 "arguments of clang; Jupyter starts this program\n";
    return 2;
  }
  try {
    using namespace shardbook::notebook;
    auto kernel =
        make_kernel(words[1], std::make_unique<JupyterKernel>(
                                  std::vector(words.begin() + 2, words.end())));
    end_with_parent();
    kernel->start();
  } catch (const std::exception& error) {
    std::cerr << "shardbook_kernel: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
