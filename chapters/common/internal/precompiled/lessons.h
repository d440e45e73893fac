// What every lesson includes first, and a reader's exercise with it.

#include "chapters/common/lesson.h"
