/* s3_xml.h: reads an XML answer, which comes from a server that may be hostile: no document type and so no entities, at most
 * S3_XML_DEPTH_MAX levels, bounded texts. Pure. */
#pragma once
#include "base/err.h"
#include "base/str.h"

enum { S3_XML_DEPTH_MAX = 8, S3_XML_PATH_MAX = 256, S3_XML_TEXT_MAX = 8192 };

/* Called as an element ends: its path, "ListBucketResult/Contents/Key", and the text that is in it directly. */
typedef enum err (*s3_xml_fn)(void *user, const char *path, struct str text);
/* Names of elements lose a namespace's prefix. ERR_STORAGE_IO: no XML that counts; else what fn returned. */
FALLIBLE enum err s3_xml_read(struct str xml, s3_xml_fn fn, void *user);
