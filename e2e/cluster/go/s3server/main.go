// The S3 server of Versity over a folder: `s3server FOLDER ADDRESS`. It checks signatures; the one account comes
// from ROOT_ACCESS_KEY and ROOT_SECRET_KEY. What belongs to objects lies beside them, so that any file system does.
package main

import (
	"context"
	"log"
	"os"
	"path/filepath"

	"github.com/versity/versitygw/backend/meta"
	"github.com/versity/versitygw/backend/posix"
	"github.com/versity/versitygw/embedgw"
)

func main() {
	objects, metadata := filepath.Join(os.Args[1], "objects"), filepath.Join(os.Args[1], "metadata")
	for _, folder := range []string{objects, metadata} {
		if err := os.MkdirAll(folder, 0o700); err != nil {
			log.Fatal(err)
		}
	}
	storer, err := meta.NewSideCar(metadata)
	if err != nil {
		log.Fatal(err)
	}
	backend, err := posix.New(objects, storer, posix.PosixOpts{SideCarDir: metadata})
	if err != nil {
		log.Fatal(err)
	}
	log.Fatal(embedgw.RunVersityGW(context.Background(), backend, &embedgw.Config{
		RootUserAccess:    os.Getenv("ROOT_ACCESS_KEY"),
		RootUserSecret:    os.Getenv("ROOT_SECRET_KEY"),
		Ports:             []string{os.Args[2]},
		MaxConnections:    1000,
		MaxRequests:       1000,
		MultipartMaxParts: 10000,
		KeepAlive:         true,
		Quiet:             true,
	}))
}
