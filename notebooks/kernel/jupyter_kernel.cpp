#include "notebooks/kernel/jupyter_kernel.h"

#include <cxxabi.h>

#include <cstdlib>
#include <exception>
#include <optional>
#include <typeinfo>

#include "notebooks/kernel/cell_grammar.h"
#include "notebooks/kernel/cursor.h"
#include "notebooks/kernel/directives.h"
#include "notebooks/kernel/interruption.h"
#include "notebooks/kernel/xcpp/xdisplay.hpp"

namespace shardbook::notebook {
namespace {

JupyterKernel* the_kernel = nullptr;

/// The type of the exception that is being handled.
std::string current_exception_type() {
  const std::type_info* type = abi::__cxa_current_exception_type();
  if (type == nullptr) return "exception";
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(type->name(), nullptr, nullptr, &status), std::free);
  return name ? name.get() : type->name();
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

}  // namespace

JupyterKernel::JupyterKernel(std::vector<std::string> clang_arguments) {
  the_kernel = this;
  run_on_cell_thread(
      [&] { compiler_ = std::make_unique<Compiler>(clang_arguments); }, true);
}

void JupyterKernel::show(const DisplayRequest& request) {
  if (the_kernel != nullptr) the_kernel->thread_.show(request);
}

CellOutput JupyterKernel::output(bool silent) {
  if (silent) {
    return {[](const char*, const std::string&) {},
            [](const DisplayRequest&) {}};
  }
  return {[this](const char* name, const std::string& text) {
            publish_stream(name, text);
          },
          [this](const DisplayRequest& request) { publish_display(request); }};
}

void JupyterKernel::publish_display(const DisplayRequest& request) {
  if (request.kind == DisplayRequest::Kind::kClear) {
    clear_output(request.wait);
    return;
  }
  nl::json transient = nl::json::object();
  if (!request.id.empty()) transient["display_id"] = request.id;
  if (request.kind == DisplayRequest::Kind::kUpdate) {
    update_display_data(request.bundle, nl::json::object(), transient);
  } else {
    display_data(request.bundle, nl::json::object(), transient);
  }
}

/// Throws CellError, in this thread, as `work` failed in the other.
void JupyterKernel::run_on_cell_thread(const std::function<void()>& work,
                                       bool silent) {
  std::optional<CellError> error;
  const bool returned =
      thread_.run([&] { error = failure_of(work); }, output(silent));
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

void JupyterKernel::run_directives(const std::string& code,
                                   const std::string& name) {
  const Directives directives = directives_of(code);
  if (!directives.error.empty()) {
    throw CellError{"PragmaError", directives.error};
  }
  for (const Directive& directive : directives.list) {
    switch (directive.kind) {
      case DirectiveKind::kIncludePath:
        compiler_->add_include_path(directive.value);
        break;
      case DirectiveKind::kLibraryPath:
        library_folders_.push_back(directive.value);
        break;
      case DirectiveKind::kLoad: {
        const std::string file =
            find_library(directive.value, library_folders_);
        if (file.empty()) {
          throw CellError{
              "LoadError",
              "load(\"" + directive.value + "\"): there is no such library" +
                  (library_folders_.empty()
                       ? "; add_library_path(\"...\") tells where to look"
                       : " in " + library_folders_.back()) +
                  "; ./shardbook notebook builds the book's libraries"};
        }
        compiler_->load(file);
        break;
      }
    }
  }
  if (directives.rest.find('#') != std::string::npos) {
    compiler_->run(directives.rest, name);
  }
}

void JupyterKernel::run_cell(int count, const std::string& code) {
  const std::string name = "cell " + std::to_string(count);
  const CellOutline outline = outline_of(code);
  switch (outline.kind) {
    case CellKind::kEmpty:
      break;
    case CellKind::kRefused:
      throw CellError{"GrammarError", name + ", line " +
                                          std::to_string(outline.line) + ": " +
                                          outline.reason};
    case CellKind::kDirectives:
      run_directives(code, name);
      break;
    case CellKind::kNamespaces:
    case CellKind::kStatements:
      compiler_->run(code, name);
      break;
  }
}

nl::json JupyterKernel::execute(int count, const std::string& code,
                                bool silent) {
  // xeus prints its version when it starts.
  if (!has_run_) thread_.drop_output();
  has_run_ = true;
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

nl::json JupyterKernel::complete_request_impl(const std::string& code,
                                              int cursor) {
  const std::string before = code.substr(0, byte_of(code, cursor));
  const int begin = cursor - characters_in(word_before(before, before.size()));
  std::vector<std::string> names;
  try {
    const std::string name = name_before(before, before.size());
    run_on_cell_thread([&] { names = compiler_->completions(name); }, true);
  } catch (const CellError&) {
    // Without names, the front end shows none.
  }
  return xeus::create_complete_reply(names, begin, cursor);
}

nl::json JupyterKernel::inspect_request_impl(const std::string& code,
                                             int cursor, int) {
  const std::string name = name_around(code, byte_of(code, cursor));
  std::string text;
  try {
    run_on_cell_thread([&] { text = compiler_->description(name); }, true);
  } catch (const CellError&) {
    // The same.
  }
  if (text.empty()) return xeus::create_inspect_reply();
  return xeus::create_inspect_reply(true, {{"text/plain", text}});
}

nl::json JupyterKernel::is_complete_request_impl(const std::string& code) {
  return xeus::create_is_complete_reply(completeness_of(code));
}

nl::json JupyterKernel::kernel_info_request_impl() {
  return xeus::create_info_reply(
      "5.3", "shardbook", "0.1.0", "C++", "17", "text/x-c++src", ".cpp", "cpp",
      "text/x-c++src", "", "C++17 cells, as in xeus-cling");
}

void JupyterKernel::shutdown_request_impl() {
  // The globals of cells are destroyed on the thread that made them.
  try {
    run_on_cell_thread([&] { compiler_.reset(); }, true);
  } catch (const CellError&) {
    // It has crashed: there is nothing left to destroy.
  }
}

// ---- Called by cells: xcpp/xdisplay.hpp

void display_bundle(const nl::json& bundle, const std::string& id,
                    bool update) {
  DisplayRequest request;
  request.kind =
      update ? DisplayRequest::Kind::kUpdate : DisplayRequest::Kind::kDisplay;
  request.bundle = bundle;
  request.id = id;
  JupyterKernel::show(request);
}

void clear_display(bool wait) {
  DisplayRequest request;
  request.kind = DisplayRequest::Kind::kClear;
  request.wait = wait;
  JupyterKernel::show(request);
}

}  // namespace shardbook::notebook
