#include "notebooks/kernel/compiler.h"

#include <clang/AST/ASTContext.h>
#include <clang/AST/DeclCXX.h>
#include <clang/AST/RawCommentList.h>
#include <clang/Basic/FileManager.h>
#include <clang/Frontend/CompilerInstance.h>
#include <clang/Frontend/TextDiagnosticPrinter.h>
#include <clang/Interpreter/Interpreter.h>
#include <clang/Lex/HeaderSearch.h>
#include <clang/Lex/Preprocessor.h>
#include <clang/Sema/Lookup.h>
#include <clang/Sema/Sema.h>
#include <dlfcn.h>
#include <llvm/Demangle/Demangle.h>
#include <llvm/ExecutionEngine/Orc/LLJIT.h>
#include <llvm/IR/Module.h>
#include <llvm/Support/TargetSelect.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>

#include "notebooks/kernel/cell_grammar.h"
#include "notebooks/kernel/interruption.h"

namespace shardbook::notebook {
namespace {

/// A printer that appends the compiler's messages to a text. In a copy of the
/// process, it tells the parent as well.
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
    const std::size_t begin = str().size();
    TextDiagnosticPrinter::HandleDiagnostic(level, diagnostic);
    if (!in_copy_) return;
    tell_parent(str().substr(begin));
    if (level >= clang::DiagnosticsEngine::Error) limit_rest_of_child(2);
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
  llvm::InitializeNativeTarget();
  llvm::InitializeNativeTargetAsmPrinter();
  // <iostream> of GCC 13 and later has a line of assembly.
  llvm::InitializeNativeTargetAsmParser();
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

// ---- Lookup of names: completion, and Shift-Tab in Jupyter

constexpr int kLimit_s = 10;

/// Collects the names that begin with a prefix.
class Names : public clang::VisibleDeclConsumer {
 public:
  explicit Names(std::string prefix) : prefix_(std::move(prefix)) {}

  void FoundDecl(clang::NamedDecl* found, clang::NamedDecl*,
                 clang::DeclContext*, bool) override {
    const clang::IdentifierInfo* name = found->getIdentifier();
    if (name == nullptr || !name->getName().starts_with(prefix_)) return;
    // Internal names of the library begin with _ or __.
    if (prefix_.empty() && name->getName().starts_with("_")) return;
    names_.insert(name->getName().str());
  }

  std::string lines() const {
    std::string text;
    for (const std::string& name : names_) text += name + "\n";
    return text;
  }

 private:
  std::string prefix_;
  std::set<std::string> names_;
};

/// The identifiers of a qualified name.
std::vector<std::string> words_of(const std::string& name) {
  std::vector<std::string> words;
  for (const Token& token : tokens_of(name).list) {
    if (token.kind == TokenKind::kWord) words.emplace_back(token.text);
  }
  return words;
}

/// The qualified name that ends a text, such as shardbook::Ten or x.sha.
std::string last_name(std::string_view text) {
  static const std::regex name(R"((\w+(::|->|\.))*\w*$)");
  std::cmatch found;
  std::regex_search(text.data(), text.data() + text.size(), found, name);
  return found.str();
}

/// The scope of names after `declaration::` or `declaration.`.
clang::DeclContext* inside(clang::NamedDecl* declaration) {
  if (auto* space = llvm::dyn_cast<clang::NamespaceDecl>(declaration)) {
    return space;
  }
  if (auto* alias = llvm::dyn_cast<clang::NamespaceAliasDecl>(declaration)) {
    return alias->getNamespace();
  }
  if (auto* type = llvm::dyn_cast<clang::TypeDecl>(declaration)) {
    const clang::Type* meant = type->getTypeForDecl();
    return meant == nullptr ? nullptr : meant->getAsCXXRecordDecl();
  }
  if (auto* value = llvm::dyn_cast<clang::ValueDecl>(declaration)) {
    const clang::QualType type = value->getType().getNonReferenceType();
    const clang::QualType pointee = type->getPointeeType();
    return (pointee.isNull() ? type : pointee)->getAsCXXRecordDecl();
  }
  return nullptr;
}

/// All meanings of the last of `names`, as in {"shardbook", "Tensor"}.
std::vector<clang::NamedDecl*> declarations_of(
    clang::CompilerInstance& compiler, const std::vector<std::string>& names) {
  clang::Sema& sema = compiler.getSema();
  std::vector<clang::NamedDecl*> found;
  for (const std::string& name : names) {
    clang::LookupResult result(sema, &compiler.getASTContext().Idents.get(name),
                               clang::SourceLocation(),
                               clang::Sema::LookupOrdinaryName);
    result.suppressDiagnostics();
    if (&name == &names.front()) {
      sema.LookupName(result, sema.TUScope);
    } else {
      clang::DeclContext* context = inside(found.front());
      if (context != nullptr) sema.LookupQualifiedName(result, context);
    }
    found.assign(result.begin(), result.end());
    if (found.empty()) break;
  }
  return found;
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

constexpr char kMistake[] = "a mistake";

/// Runs in the child: returns kMistake, or the symbols that are missing.
std::string Compiler::compile_only(const std::string& code) {
  in_copy_ = true;
  auto unit = clang_->Parse(code);
  if (unit) {
    return unit->TheModule ? missing_symbols(*clang_, *unit->TheModule) : "";
  }
  llvm::consumeError(unit.takeError());
  return kMistake;
}

void Compiler::run(const std::string& cell, const std::string& name) {
  const std::string code = "#line 1 \"" + name + "\"\n" + cell + "\n";
  const ChildResult check = in_child([&] { return compile_only(code); });
  if (check.interrupted) throw Interrupted{};
  const bool has_mistake = check.finished
                               ? check.text == kMistake
                               : check.said.find("error:") != std::string::npos;
  if (has_mistake) throw CellError{"CompileError", tidy(check.said)};
  if (!check.finished) {
    throw CellError{"CompilerError",
                    "the compiler " + check.text +
                        " on this cell, so the cell did not run; write it in "
                        "another way"};
  }
  if (!check.text.empty()) {
    throw CellError{
        "LinkError",
        "no library that this notebook has loaded defines:" + check.text +
            "\n#pragma cling load(\"...\") loads a library; the "
            "cell did not run"};
  }
  if (!check.said.empty()) std::cerr << tidy(check.said) << std::endl;

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

std::string Compiler::describe(const std::string& name) {
  clang::CompilerInstance& compiler = *clang_->getCompilerInstance();
  clang::PrintingPolicy policy(compiler.getLangOpts());
  policy.TerseOutput = true;
  policy.PolishForDeclaration = true;
  std::string text;
  llvm::raw_string_ostream stream(text);
  for (clang::NamedDecl* found : declarations_of(compiler, words_of(name))) {
    const clang::NamedDecl* declaration = found->getUnderlyingDecl();
    if (!text.empty()) stream << "\n\n";
    declaration->print(stream, policy);
    const clang::RawComment* comment =
        compiler.getASTContext().getRawCommentForAnyRedecl(declaration);
    if (comment == nullptr) continue;
    stream << "\n\n"
           << comment->getFormattedText(compiler.getSourceManager(),
                                        compiler.getDiagnostics());
  }
  return text;
}

std::string Compiler::description(std::string_view code) {
  const std::string name = last_name(code);
  const ChildResult found = in_child([&] { return describe(name); }, kLimit_s);
  return found.finished ? found.text : "";
}

std::string Compiler::names_that_continue(const std::string& name) {
  std::vector<std::string> scope = words_of(name);
  std::string prefix(last_word(name));
  if (!prefix.empty()) scope.pop_back();
  clang::CompilerInstance& compiler = *clang_->getCompilerInstance();
  clang::Sema& sema = compiler.getSema();
  Names names(std::move(prefix));
  if (scope.empty()) {
    sema.LookupVisibleDecls(sema.TUScope, clang::Sema::LookupOrdinaryName,
                            names);
    return names.lines();
  }
  const auto found = declarations_of(compiler, scope);
  clang::DeclContext* context = found.empty() ? nullptr : inside(found[0]);
  if (context == nullptr) return "";
  sema.LookupVisibleDecls(context, clang::Sema::LookupOrdinaryName, names,
                          /*IncludeGlobalScope=*/false);
  return names.lines();
}

std::vector<std::string> Compiler::completions(std::string_view code) {
  const std::string name = last_name(code);
  const ChildResult found =
      in_child([&] { return names_that_continue(name); }, kLimit_s);
  std::vector<std::string> names;
  std::istringstream lines(found.finished ? found.text : "");
  for (std::string line; std::getline(lines, line);) names.push_back(line);
  return names;
}

}  // namespace shardbook::notebook
