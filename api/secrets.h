/* secrets.h: files with secrets: the token that callers over TCP show, a certificate's key. */
#pragma once
#include "api/http.h"

FALLIBLE enum err secrets_text(const char *path, char **text_out);     /* at most a MiB; the caller frees it */
/* Reads the token again, and makes the file if there is none. Without space for it: OK, and over TCP nobody is let in. */
FALLIBLE enum err secrets_token(struct api *a);
