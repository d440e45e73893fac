#pragma once

// oneDNN 2 (Debian 12) and 3 (Debian 13) behind one call. Read by
// core/kernels/*.cpp only.
//
// A primitive's description needs the operation, attributes, an engine and, for
// a backward pass, the description of its forward. Version 2 wraps the
// operation in a `desc` of its own; version 3 takes all of them as arguments.

#include <dnnl.hpp>

namespace shardbook::kernels::cpu {

/// The description of a forward primitive such as dnnl::matmul; `operation` is
/// the arguments of oneDNN 3 between the engine and the attributes.
template <typename Primitive, typename... Operation>
typename Primitive::primitive_desc describe_primitive(
    const dnnl::engine& engine, const dnnl::primitive_attr& attributes,
    const Operation&... operation) {
#if DNNL_VERSION_MAJOR >= 3
  return {engine, operation..., attributes};
#else
  return {typename Primitive::desc(operation...), attributes, engine};
#endif
}

/// The same for a backward primitive of `forward`.
template <typename Primitive, typename Forward, typename... Operation>
typename Primitive::primitive_desc describe_backward(
    const dnnl::engine& engine, const dnnl::primitive_attr& attributes,
    const Forward& forward, const Operation&... operation) {
#if DNNL_VERSION_MAJOR >= 3
  return {engine, operation..., forward, attributes};
#else
  return {typename Primitive::desc(operation...), attributes, engine, forward};
#endif
}

}  // namespace shardbook::kernels::cpu
