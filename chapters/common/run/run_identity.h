#pragma once

// What a run must share with the one that it continues: its model, its data,
// and every option whose declaration has no reason why it may differ
// (CommandLine). Programs that differ compare the options that both have; one
// that a program lacks has the value as which the program trains.

#include <string>
#include <vector>

#include "chapters/common/run/options.h"
#include "chapters/common/run/state_folder.h"

namespace shardbook {

/// The model's keys, the data's fingerprint, and the options: the shared ones
/// as they are in `options`, then `options.compared`.
std::vector<ComparedOption> identity_of(const Options& options);

/// Keeps an identity in a manifest.
void put_identity(const std::vector<ComparedOption>& identity,
                  Manifest& manifest);

/// "--lr 0.1 there, 0.2 here; ..."; empty where the two agree. A manifest of an
/// older version of the program may lack options: it has their defaults. A key
/// of the model that one of them lacks is no difference: it is the same in all
/// models that this version knows.
std::string differences(const Manifest& there,
                        const std::vector<ComparedOption>& here);

}  // namespace shardbook
