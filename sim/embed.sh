#!/bin/sh
# Writes files as a C++ source: embed.sh OUTPUT FILE... The file's folder and
# name become a Preset of sim/internal/presets.h.
set -e
output=$1
shift
{
  echo '#include "sim/internal/presets.h"'
  echo 'const std::vector<shardbook::sim::internal::Preset>&'
  echo 'shardbook::sim::internal::presets() {'
  echo '  static const std::vector<Preset> all = {'
  for file in "$@"; do
    folder=$(basename "$(dirname "$file")")
    printf '{"%s", "%s", R"json(' "$folder" "$(basename "$file" .json)"
    cat "$file"
    echo ')json"},'
  done
  echo '  };'
  echo '  return all;'
  echo '}'
} > "$output"
