#!/bin/sh
# Writes files as a C++ source: embed.sh OUTPUT FILE... The file's folder and
# name become a Preset of sim/internal/presets.h. Notes, keys that begin with _, are
# for who reads the file, and stay behind: two thirds of the text.
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
    awk '/^ *"_[a-z0-9_]*": / { is_left_out = 1; next }
         { if (NR > 1) print is_left_out && /^ *}/ ? last(line) : line
           line = $0; is_left_out = 0 }
         END { print line }
         function last(line) { sub(/,$/, "", line); return line }' "$file"
    echo ')json"},'
  done
  echo '  };'
  echo '  return all;'
  echo '}'
} > "$output"
