#pragma once

// One name for the same kernel on every type of device: SHARDBOOK_KERNEL(NAME,
// Type) declares cpu::NAME, cuda::NAME and a dispatcher NAME, which calls the
// one for `context.device_type`. The first parameter of Type is a
// KernelContext. cpu/ defines the first function, cuda/ the second. CUDA
// kernels are a library of their own, loaded when the first CUDA device is
// made: a machine without a GPU, and a build without CUDA, never load it. A
// build without cpu/ links as well (the symbols are weak), for runs on shapes.

#include <tuple>
#include <type_traits>
#include <utility>

#include "core/check.h"
#include "core/kernels/kernel_context.h"

namespace shardbook::kernels {

template <typename Signature>
class Kernel;

template <typename Result, typename... Args>
class Kernel<Result(KernelContext&, Args...)> {
 public:
  using Function = Result(KernelContext&, Args...);

  constexpr Kernel(const char* name, Function* cpu) : name_(name), cpu_(cpu) {}
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  /// Arrays lie in the memory of the context's device. On CUDA a kernel without
  /// a result returns before it has run.
  Result operator()(KernelContext& context, Args... args) const {
    return function(context)(context, std::forward<Args>(args)...);
  }
  /// Arguments that are left out at the end are false or null.
  template <typename... Given,
            typename = std::enable_if_t<(sizeof...(Given) < sizeof...(Args))>>
  Result operator()(KernelContext& context, Given&&... given) const {
    return call_with_rest(context, std::forward<Given>(given)...);
  }

  /// Called while the library of the CUDA kernels is loaded.
  void set_cuda(Function* function) { cuda_ = function; }
  bool has_cuda() const { return cuda_ != nullptr; }

 private:
  Function* function(const KernelContext& context) const {
    const bool on_cuda = context.device_type == DeviceType::kCuda;
    Function* const function = on_cuda ? cuda_ : cpu_;
    SB_CHECK(function != nullptr, "kernels: ", name_, " has no version for ",
             on_cuda ? "CUDA" : "the CPU in this build");
    return function;
  }
  template <typename... Given>
  Result call_with_rest(KernelContext& context, Given&&... given) const {
    if constexpr (sizeof...(Given) == sizeof...(Args)) {
      return function(context)(context, std::forward<Given>(given)...);
    } else {
      using Next = std::tuple_element_t<sizeof...(Given), std::tuple<Args...>>;
      static_assert(std::is_same_v<Next, bool> || !std::is_arithmetic_v<Next>,
                    "a number cannot be left out");
      return call_with_rest(context, std::forward<Given>(given)..., Next{});
    }
  }

  const char* name_;
  Function* cpu_;
  Function* cuda_ = nullptr;
};

/// Declares a function by its type.
template <typename Signature>
using FunctionOf = Signature;

}  // namespace shardbook::kernels

#define SHARDBOOK_KERNEL(name, ...)           \
  namespace cpu {                             \
  [[gnu::weak]] FunctionOf<__VA_ARGS__> name; \
  }                                           \
  namespace cuda {                            \
  FunctionOf<__VA_ARGS__> name;               \
  }                                           \
  inline Kernel<__VA_ARGS__> name(#name, &cpu::name)

/// At the end of a .cu file, for each kernel that it defines.
#define SHARDBOOK_CUDA_KERNEL(name)                                            \
  [[maybe_unused]] static const bool name##_is_registered =                    \
      (::shardbook::kernels::name.set_cuda(&::shardbook::kernels::cuda::name), \
       true)
