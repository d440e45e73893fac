#include "chapters/common/lesson.h"
#include "chapters/common/pipeline/partition.h"
#include "comm/device_mesh.h"
