#!/bin/sh
# Writes the pieces of report.html as strings: embed.sh OUTPUT TEMPLATE STYLE
# WORDS SCRIPT...
set -eu
output=$1 template=$2 style=$3 words=$4
shift 4
piece() {
  echo "std::string $1() { return R\"html("
  shift
  cat "$@"
  echo ')html" + 1; }'
}
{
  echo '#include "chapters/table/internal/page.h"'
  echo 'namespace shardbook::table::internal {'
  piece page_template "$template"
  piece page_style "$style"
  piece page_words "$words"
  piece page_script "$@"
  echo '}'
} >"$output"
