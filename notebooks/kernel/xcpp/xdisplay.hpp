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

// The kernel's side. The texts are JSON.
extern "C" void shardbook_kernel_display(const char* data, const char* id,
                                         bool update);
extern "C" void shardbook_kernel_clear(bool wait);

namespace xcpp {

template <typename T>
void display(const T& value) {
  shardbook_kernel_display(mime_bundle_repr(value).dump().c_str(), "", false);
}

/// With an `id`, a later call with `update` replaces what this one shows.
template <typename T>
void display(const T& value, const std::string& id, bool update = false) {
  shardbook_kernel_display(mime_bundle_repr(value).dump().c_str(), id.c_str(),
                           update);
}

inline void clear_output(bool wait = false) { shardbook_kernel_clear(wait); }

}  // namespace xcpp
