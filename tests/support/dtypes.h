#pragma once

// The element types that tests run over.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/dtype.h"

namespace shardbook {

inline const std::vector<DType> kFloatingDTypes = {DType::kF64, DType::kF32,
                                                   DType::kBF16, DType::kF16};
inline const std::vector<DType> kAllDTypes = {DType::kF64,  DType::kF32,
                                              DType::kBF16, DType::kF16,
                                              DType::kI64,  DType::kI32};

/// A tolerance that each floating type has its own of.
inline double by_dtype(DType dtype, double f64, double f32, double bf16,
                       double f16) {
  return dtype == DType::kF64    ? f64
         : dtype == DType::kF32  ? f32
         : dtype == DType::kBF16 ? bf16
                                 : f16;
}

inline std::string dtype_test_name(
    const ::testing::TestParamInfo<DType>& info) {
  return dtype_name(info.param);
}

#define SB_OVER_FLOATING_DTYPES(suite) \
  INSTANTIATE_TEST_SUITE_P(            \
      Dtypes, suite, ::testing::ValuesIn(kFloatingDTypes), dtype_test_name)
#define SB_OVER_ALL_DTYPES(suite)                                          \
  INSTANTIATE_TEST_SUITE_P(Dtypes, suite, ::testing::ValuesIn(kAllDTypes), \
                           dtype_test_name)

}  // namespace shardbook
