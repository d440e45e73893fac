// Lookup of names in the compiler: completion, and Shift-Tab in Jupyter.

#include <clang/AST/ASTContext.h>
#include <clang/AST/DeclCXX.h>
#include <clang/AST/RawCommentList.h>
#include <clang/Frontend/CompilerInstance.h>
#include <clang/Interpreter/Interpreter.h>
#include <clang/Sema/Lookup.h>
#include <clang/Sema/Sema.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "notebooks/kernel/child.h"
#include "notebooks/kernel/compiler.h"
#include "notebooks/kernel/tokens.h"

namespace shardbook::notebook {
namespace {

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

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// The identifiers of a qualified name.
std::vector<std::string> words_of(const std::string& name) {
  std::vector<std::string> words;
  for (const Token& token : tokens_of(name).list) {
    if (token.kind == TokenKind::kWord) words.emplace_back(token.text);
  }
  return words;
}

/// The number of bytes of the separator (:: -> .) that ends a text.
std::size_t separator_behind(std::string_view text) {
  const std::string_view two =
      text.substr(text.size() - std::min<std::size_t>(text.size(), 2));
  if (two == "::" || two == "->") return 2;
  return !text.empty() && text.back() == '.' ? 1 : 0;
}

/// The qualified name that ends a text, such as shardbook::Ten or x.sha.
std::string last_name(std::string_view text) {
  std::string_view before = text;
  before.remove_suffix(last_word(text).size());
  while (const std::size_t size = separator_behind(before)) {
    const std::string_view rest = before.substr(0, before.size() - size);
    if (last_word(rest).empty()) break;
    before = rest.substr(0, rest.size() - last_word(rest).size());
  }
  return std::string(text.substr(before.size()));
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
  const ChildResult found =
      in_child([&] { return describe(name); }, diagnostics_, kLimit_s);
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
  const ChildResult found = in_child([&] { return names_that_continue(name); },
                                     diagnostics_, kLimit_s);
  return found.finished ? lines_of(found.text) : std::vector<std::string>{};
}

}  // namespace shardbook::notebook
