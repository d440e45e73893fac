// A reference into the library of every chapter. A linker leaves out libraries
// that nothing refers to, and cells refer to them only later.

#include "chapters/programs/programs.h"

namespace shardbook::notebook {

const std::vector<NamedProgram>& every_chapter();

const std::vector<NamedProgram>& every_chapter() { return programs(); }

}  // namespace shardbook::notebook
