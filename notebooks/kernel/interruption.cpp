#include "notebooks/kernel/interruption.h"

#include <llvm/IR/CFG.h>
#include <llvm/IR/Dominators.h>
#include <llvm/IR/IRBuilder.h>
#include <llvm/IR/InstIterator.h>
#include <llvm/IR/Module.h>
#include <llvm/Transforms/Utils/BasicBlockUtils.h>

#include <atomic>
#include <exception>
#include <set>
#include <vector>

namespace {

std::atomic<int> interrupted{0};

}  // namespace

/// Called by the loops of cells when the flag is set. Must not throw in a
/// destructor that loops while an exception passes.
extern "C" void shardbook_kernel_interrupt() {
  if (std::uncaught_exceptions() == 0) throw shardbook::notebook::Interrupted{};
}

namespace shardbook::notebook {
namespace {

/// The jumps back to the head of a loop: their ends dominate them.
std::vector<llvm::Instruction*> jumps_back(llvm::Function& function) {
  std::vector<llvm::Instruction*> jumps;
  const llvm::DominatorTree tree(function);
  for (llvm::BasicBlock& block : function) {
    if (!tree.isReachableFromEntry(&block)) continue;
    for (llvm::BasicBlock* next : llvm::successors(&block)) {
      if (tree.dominates(next, &block)) {
        jumps.push_back(block.getTerminator());
        break;
      }
    }
  }
  return jumps;
}

bool calls(const llvm::BasicBlock& block, llvm::StringRef name) {
  return llvm::any_of(block, [&](const llvm::Instruction& instruction) {
    const auto* call = llvm::dyn_cast<llvm::CallBase>(&instruction);
    const llvm::Function* callee = call ? call->getCalledFunction() : nullptr;
    return callee != nullptr && callee->getName() == name;
  });
}

/// True if an exception from this call would reach a noexcept function, such as
/// a destructor, and end the program.
bool must_not_throw(const llvm::InvokeInst& invoke) {
  std::vector<const llvm::BasicBlock*> open = {invoke.getUnwindDest()};
  std::set<const llvm::BasicBlock*> seen;
  while (!open.empty()) {
    const llvm::BasicBlock* block = open.back();
    open.pop_back();
    if (!seen.insert(block).second || calls(*block, "__cxa_begin_catch")) {
      continue;
    }
    if (calls(*block, "__clang_call_terminate")) return true;
    const llvm::Instruction* end = block->getTerminator();
    if (const auto* next = llvm::dyn_cast<llvm::InvokeInst>(end)) {
      open.push_back(next->getNormalDest());
    } else {
      open.insert(open.end(), llvm::succ_begin(block), llvm::succ_end(block));
    }
  }
  return false;
}

/// The functions that are called where nothing may be thrown, and those that
/// they call.
std::set<const llvm::Function*> functions_that_must_not_throw(
    const llvm::Module& module) {
  std::vector<const llvm::Function*> open;
  const auto visit = [&](const llvm::Function& function, bool all) {
    for (const llvm::Instruction& instruction : llvm::instructions(function)) {
      const auto* call = llvm::dyn_cast<llvm::CallBase>(&instruction);
      if (call == nullptr || call->getCalledFunction() == nullptr) continue;
      const auto* invoke = llvm::dyn_cast<llvm::InvokeInst>(call);
      if (all || (invoke != nullptr && must_not_throw(*invoke))) {
        open.push_back(call->getCalledFunction());
      }
    }
  };
  for (const llvm::Function& function : module) visit(function, false);
  std::set<const llvm::Function*> found;
  while (!open.empty()) {
    const llvm::Function* function = open.back();
    open.pop_back();
    if (found.insert(function).second) visit(*function, true);
  }
  return found;
}

/// if (flag != 0) shardbook_kernel_interrupt();
void add_check(llvm::Instruction* before, llvm::Value* flag,
               llvm::FunctionCallee interrupt) {
  llvm::IRBuilder<> builder(before);
  llvm::LoadInst* value =
      builder.CreateLoad(builder.getInt32Ty(), flag, /*isVolatile=*/true);
  llvm::Value* is_set = builder.CreateICmpNE(value, builder.getInt32(0));
  llvm::Instruction* then =
      llvm::SplitBlockAndInsertIfThen(is_set, before, /*Unreachable=*/false);
  llvm::IRBuilder<>(then).CreateCall(interrupt);
}

}  // namespace

void set_interrupted(bool value) { interrupted = value; }
bool is_interrupted() { return interrupted != 0; }

void add_interruption_checks(llvm::Module& module) {
  llvm::LLVMContext& context = module.getContext();
  const llvm::FunctionCallee interrupt = module.getOrInsertFunction(
      "shardbook_kernel_interrupt",
      llvm::FunctionType::get(llvm::Type::getVoidTy(context), false));
  // The flag's address in this process, as a constant
  llvm::Value* flag = llvm::ConstantExpr::getIntToPtr(
      llvm::ConstantInt::get(llvm::Type::getInt64Ty(context),
                             reinterpret_cast<std::uintptr_t>(&interrupted)),
      llvm::PointerType::getUnqual(context));
  const std::set<const llvm::Function*> spared =
      functions_that_must_not_throw(module);
  for (llvm::Function& function : module) {
    if (function.isDeclaration() || spared.count(&function) != 0) continue;
    for (llvm::Instruction* jump : jumps_back(function)) {
      add_check(jump, flag, interrupt);
    }
    // Functions known not to throw may throw now, and so may their callers.
    function.removeFnAttr(llvm::Attribute::NoUnwind);
    function.setUWTableKind(llvm::UWTableKind::Async);
    for (llvm::Instruction& instruction : llvm::instructions(function)) {
      auto* call = llvm::dyn_cast<llvm::CallBase>(&instruction);
      if (call == nullptr) continue;
      const llvm::Function* callee = call->getCalledFunction();
      if (callee == nullptr || !callee->isIntrinsic()) {
        call->removeFnAttr(llvm::Attribute::NoUnwind);
      }
    }
  }
}

}  // namespace shardbook::notebook
