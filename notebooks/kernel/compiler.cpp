#include "notebooks/kernel/compiler.h"

#include <clang/Basic/FileManager.h>
#include <clang/Frontend/CompilerInstance.h>
#include <clang/Frontend/TextDiagnosticPrinter.h>
#include <clang/Interpreter/Interpreter.h>
#include <clang/Lex/HeaderSearch.h>
#include <clang/Lex/Preprocessor.h>
#include <dlfcn.h>
#include <llvm/Demangle/Demangle.h>
#include <llvm/ExecutionEngine/Orc/LLJIT.h>
#include <llvm/IR/Module.h>
#include <llvm/Support/TargetSelect.h>

#include <filesystem>
#include <iostream>
#include <stdexcept>

#include "notebooks/kernel/child.h"
#include "notebooks/kernel/interruption.h"

namespace shardbook::notebook {
namespace {

/// A printer that appends the compiler's messages to a text.
class Collector : private llvm::raw_string_ostream,
                  public clang::TextDiagnosticPrinter {
 public:
  Collector(std::string& text, clang::DiagnosticOptions* options,
            const bool& in_copy)
      : raw_string_ostream(text),
        TextDiagnosticPrinter(static_cast<raw_string_ostream&>(*this), options),
        in_copy_(in_copy) {}

  /// After a mistake clang 19 may crash or loop for ever while it recovers, so
  /// a copy of the process that finds one gets two more seconds.
  void HandleDiagnostic(clang::DiagnosticsEngine::Level level,
                        const clang::Diagnostic& diagnostic) override {
    TextDiagnosticPrinter::HandleDiagnostic(level, diagnostic);
    if (level >= clang::DiagnosticsEngine::Error && in_copy_) {
      limit_rest_of_child(2);
    }
  }

 private:
  const bool& in_copy_;
};

/// Removes lines about the file that clang's interpreter pretends to read.
std::string tidy(std::string text) {
  const std::string line = "In file included from <<< inputs >>>:1:\n";
  for (std::size_t at; (at = text.find(line)) != std::string::npos;) {
    text.erase(at, line.size());
  }
  text = text.substr(0, text.find("<<< inputs >>>:"));
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

/// Names in `module` that neither this process nor an earlier cell defines.
std::string missing_symbols(clang::Interpreter& clang,
                            const llvm::Module& module) {
  std::string missing;
  const auto look_up = [&](const llvm::GlobalValue& value) {
    const std::string name = value.getName().str();
    if (!value.isDeclaration() || value.use_empty() ||
        value.hasExternalWeakLinkage() || name.compare(0, 5, "llvm.") == 0) {
      return;
    }
    const bool found =
        !value.isThreadLocal() && dlsym(RTLD_DEFAULT, name.c_str()) != nullptr;
    if (found) return;
    auto address = clang.getSymbolAddressFromLinkerName(name);
    if (address) return;
    llvm::consumeError(address.takeError());
    missing += "\n  " + llvm::demangle(name);
  };
  for (const llvm::Function& function : module) look_up(function);
  for (const llvm::GlobalVariable& variable : module.globals()) {
    look_up(variable);
  }
  return missing;
}

/// Throws std::runtime_error where clang does not start with these arguments.
std::unique_ptr<clang::Interpreter> make_clang(
    const std::vector<std::string>& arguments) {
  static const bool ready = [] {
    llvm::InitializeNativeTarget();
    llvm::InitializeNativeTargetAsmPrinter();
    // <iostream> of GCC 13 and later has a line of assembly.
    llvm::InitializeNativeTargetAsmParser();
    return true;
  }();
  static_cast<void>(ready);
  std::vector<const char*> words;
  for (const std::string& word : arguments) words.push_back(word.c_str());
  clang::IncrementalCompilerBuilder builder;
  builder.SetCompilerArgs(words);
  auto instance = builder.CreateCpp();
  if (!instance) throw std::runtime_error(llvm::toString(instance.takeError()));
  (*instance)->LoadRequestedPlugins();
  auto made = clang::Interpreter::create(std::move(*instance));
  if (!made) throw std::runtime_error(llvm::toString(made.takeError()));
  return std::move(*made);
}

}  // namespace

Compiler::Compiler(std::vector<std::string> arguments)
    : arguments_(std::move(arguments)), clang_(make_clang(arguments_)) {
  clang::CompilerInstance& instance = *clang_->getCompilerInstance();
  clang::DiagnosticsEngine& engine = instance.getDiagnostics();
  auto collector = std::make_unique<Collector>(
      diagnostics_, &engine.getDiagnosticOptions(), in_copy_);
  collector->BeginSourceFile(instance.getLangOpts(),
                             &instance.getPreprocessor());
  engine.setClient(collector.release());
  auto jit = clang_->getExecutionEngine();
  if (!jit) throw std::runtime_error(llvm::toString(jit.takeError()));
  jit->getIRTransformLayer().setTransform(
      [](llvm::orc::ThreadSafeModule module,
         llvm::orc::MaterializationResponsibility&) {
        module.withModuleDo(
            [](llvm::Module& inner) { add_interruption_checks(inner); });
        return llvm::Expected<llvm::orc::ThreadSafeModule>(std::move(module));
      });
}

Compiler::~Compiler() = default;

/// Runs in the child: returns the mistakes, with E, L or W (a warning) first.
std::string Compiler::compile_only(const std::string& code) {
  in_copy_ = true;
  auto unit = clang_->Parse(code);
  if (!unit) {
    llvm::consumeError(unit.takeError());
    return "E" + diagnostics_;
  }
  if (unit->TheModule) {
    const std::string missing = missing_symbols(*clang_, *unit->TheModule);
    if (!missing.empty()) return "L" + missing;
  }
  return "W" + diagnostics_;
}

void Compiler::run(const std::string& cell, const std::string& name) {
  const std::string code = "#line 1 \"" + name + "\"\n" + cell + "\n";
  diagnostics_.clear();
  const ChildResult check =
      in_child([&] { return compile_only(code); }, diagnostics_);
  if (check.interrupted) throw Interrupted{};
  if (!check.finished && check.remarks.find("error:") != std::string::npos) {
    throw CellError{"CompileError", tidy(check.remarks)};
  }
  if (!check.finished) {
    throw CellError{"CompilerError",
                    "the compiler " + check.text +
                        " on this cell, so the cell did not run; write it in "
                        "another way"};
  }
  const std::string said = check.text.substr(1);
  if (check.text[0] == 'E') throw CellError{"CompileError", tidy(said)};
  if (check.text[0] == 'L') {
    throw CellError{"LinkError",
                    "no library that this notebook has loaded defines:" + said +
                        "\n#pragma cling load(\"...\") loads a library; the "
                        "cell did not run"};
  }
  if (!said.empty()) std::cerr << tidy(said) << std::endl;

  diagnostics_.clear();
  auto unit = clang_->Parse(code);
  if (!unit) {
    llvm::consumeError(unit.takeError());
    throw CellError{"CompileError", tidy(diagnostics_)};
  }
  if (llvm::Error error = clang_->Execute(*unit)) {
    throw CellError{"LinkError", llvm::toString(std::move(error)) +
                                     "\nThe cells that follow may fail for "
                                     "this reason, too: restart the kernel"};
  }
}

void Compiler::add_include_path(const std::string& folder) {
  clang::CompilerInstance& instance = *clang_->getCompilerInstance();
  const std::string path = std::filesystem::absolute(folder).string();
  auto found = instance.getFileManager().getOptionalDirectoryRef(path);
  if (!found) {
    throw CellError{"PragmaError",
                    "add_include_path(\"" + folder + "\"): no such folder"};
  }
  instance.getPreprocessor().getHeaderSearchInfo().AddSearchPath(
      clang::DirectoryLookup(*found, clang::SrcMgr::C_User, false),
      /*isAngled=*/true);
}

void Compiler::load(const std::string& file) {
  if (dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    throw CellError{"LoadError", dlerror()};
  }
}

}  // namespace shardbook::notebook
