#pragma once

// Rich output of cells, under the names that xeus-cling and xeus-cpp use. What
// a value looks like, a function beside its type says:
//
//   nl::json mime_bundle_repr(const Picture& picture) {
//     return {{"image/svg+xml", picture.svg}, {"text/plain", "a picture"}};
//   }

#include <nlohmann/json.hpp>
#include <string>

namespace nl = nlohmann;

/// The kernel's side, which is compiled: a cell with the code of JSON in it
/// takes a second to compile.
namespace shardbook::notebook {
void display_bundle(const nl::json& bundle, const std::string& id, bool update);
void clear_display(bool wait);
}  // namespace shardbook::notebook

namespace xcpp {

/// With an `id`, a later call with `update` replaces what this one shows.
template <typename T>
void display(const T& value, const std::string& id, bool update = false) {
  shardbook::notebook::display_bundle(mime_bundle_repr(value), id, update);
}

template <typename T>
void display(const T& value) {
  display(value, std::string());
}

inline void clear_output(bool wait = false) {
  shardbook::notebook::clear_display(wait);
}

}  // namespace xcpp
