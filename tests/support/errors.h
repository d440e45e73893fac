#pragma once

// Errors as text, and what a text has to contain.

#include <gtest/gtest.h>

#include <concepts>
#include <string>
#include <vector>

#include "core/check.h"

namespace shardbook {

inline bool has_text(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// The text has all these parts.
inline void expect_text(const std::string& text,
                        const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_TRUE(has_text(text, part)) << "'" << part << "' is not in: " << text;
  }
}

/// The text of the Error that `body` throws; "" when it throws none.
template <std::invocable Body>
std::string error_of(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

/// `body` throws an Error whose text has all these parts.
template <std::invocable Body>
void expect_error(Body&& body, const std::vector<std::string>& parts) {
  expect_text(error_of(body), parts);
}

}  // namespace shardbook
