# Words after ./shardbook at Tab, in bash: eval "$(./shardbook completion bash)"
_shardbook() {
  local script
  script=$(readlink -f -- "$(type -P -- "${1/#\~\//$HOME/}")") &&
    mapfile -t COMPREPLY < <(python3 -S -B \
      "${script%/*}/chapters/table/completion.py" \
      "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o default -F _shardbook shardbook
