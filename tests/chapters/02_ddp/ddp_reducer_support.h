#pragma once

// Models and options that make single buckets visible to the reducer's tests.

#include <cstdint>
#include <string>
#include <vector>

#include "tests/chapters/02_ddp/ddp_support.h"

namespace shardbook::ddp_test {

using Numels = std::vector<std::int64_t>;

inline ddp::DdpOptions tiny_buckets(double bytes = 1) {
  ddp::DdpOptions options;
  options.bucket_cap_mb = options.first_bucket_mb = bytes * kByte;
  return options;
}

/// Two branches; each call uses the ones in `use`, in that order.
class Branches : public ModuleOf<Branches> {
 public:
  explicit Branches(DType dtype = DType::kF64)
      : a("a", 5, 3, init_of(dtype)), b("b", 5, 3, init_of(dtype)) {}
  Tensor forward(const Tensor& x) override {
    Tensor y;
    for (const char name : use) {
      const Tensor part = name == 'a' ? a(x) : b(x);
      y = y.defined() ? add(y, part) : part;
    }
    return y;
  }
  void members(MemberVisitor& visit) override {
    visit.module("a", a);
    visit.module("b", b);
  }
  Linear a, b;
  std::string use = "ab";
};

}  // namespace shardbook::ddp_test
