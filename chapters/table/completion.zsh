# Words after ./shardbook at Tab, in zsh: eval "$(./shardbook completion zsh)"
_shardbook() {
  local script=${~words[1]}
  local -a found=(${(f)"$(python3 -S -B \
    ${${script:c:A}:h}/chapters/table/completion.py \
    "${(@)words[2,CURRENT-1]}" "$PREFIX" 2>/dev/null)"})
  if (($#found)); then compadd -a found; else _files; fi
}
(($+functions[compdef])) || { autoload -Uz compinit && compinit }
compdef _shardbook shardbook
