#pragma once

#include <memory>
#include <string>
#include <vector>

namespace clang {
class Interpreter;
}

namespace shardbook::notebook {

/// Throws std::runtime_error where clang does not start with these arguments.
std::unique_ptr<clang::Interpreter> make_clang(
    const std::vector<std::string>& arguments);

}  // namespace shardbook::notebook
